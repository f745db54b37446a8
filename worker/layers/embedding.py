"""Token ids to vectors."""

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor, nn


class Embedding(nn.Module):
    """A table of one vector per token id. [rows] -> [rows, hidden]"""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(
            torch.empty(vocab_size, hidden_size, dtype=dtype, device=device), requires_grad=False
        )
        """[vocab, hidden]"""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of the tokens."""
        return F.embedding(tokens, self.weight)

"""Token ids to vectors, in some models scaled."""

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor, nn


class Embedding(nn.Module):
    """A table of one vector per token id, times `scale`. [rows] -> [rows, hidden]

    The scale is rounded to the table's dtype first, as models were trained with it.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float = 1.0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._scale = float(torch.tensor(scale, dtype=dtype))
        self.weight: Tensor = nn.Parameter(
            torch.empty(vocab_size, hidden_size, dtype=dtype, device=device), requires_grad=False
        )
        """[vocab, hidden]"""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of the tokens."""
        vectors = F.embedding(tokens, self.weight)
        return vectors if self._scale == 1.0 else vectors.mul_(self._scale)

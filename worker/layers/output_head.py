"""From hidden states to the logits of this rank's part of the vocabulary."""

import math

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor, nn

from worker.layers.linear import Linear
from worker.shard import VocabularyShard


class OutputHead(nn.Module):
    """Scores this rank's token ids. [rows, hidden] -> [rows, vocabulary.width]

    All ranks return the same width; what is no token has the logit -inf and is never sampled.
    On a GPU logits are float32: rounded to bfloat16 they would differ by steps of 0.125, and the
    first choice would often be a draw.
    """

    def __init__(
        self,
        hidden_size: int,
        vocabulary: VocabularyShard,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.ids = vocabulary.ids
        self._padding = vocabulary.width - vocabulary.ids.size
        self.product = Linear(
            hidden_size,
            vocabulary.ids.size,
            bias=False,
            dtype=dtype,
            device=device,
            out_dtype=torch.float32 if device.type == "cuda" else dtype,
            keeps_dtype=True,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.product(hidden)
        return F.pad(logits, (0, self._padding), value=-math.inf) if self._padding else logits

    def tie(self, table: Tensor) -> None:
        """Use this rank's rows of an embedding table, [vocab, hidden], until prepared."""
        rows = table[self.ids.start : self.ids.start + self.ids.size]
        self.product.tie(nn.Parameter(rows, requires_grad=False))

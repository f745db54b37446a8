"""Sampling on a GPU: rows without filters in one kernel, all others by torch.

Of several ranks each draws among its own tokens; they exchange three numbers a row, as
`worker.sharded_sampler` does.
"""

import torch
from torch import Tensor

from worker.kernels.drawing import draw_candidates
from worker.parallel import TensorParallel
from worker.sampler import Samples, SamplingRows
from worker.shard import divide_vocabulary
from worker.sharded_sampler import ShardedSampler, largest_candidate


class CudaSampler:
    """`RowSampler` of a GPU, whose `draw` can be captured in a graph."""

    def __init__(self, vocab_size: int, group: TensorParallel) -> None:
        self._group = group
        self._by_torch = ShardedSampler(vocab_size, group)
        vocabulary = divide_vocabulary(vocab_size, rank=group.rank, size=group.size)
        self._first_id = vocabulary.ids.start

    def sample(self, logits: Tensor, rows: SamplingRows) -> Samples:
        """Choose a token for each row of this rank's logits, [rows, width]."""
        if len(rows.filtered):
            return self._by_torch.sample(logits.float(), rows)
        return self.draw(logits, rows.temperatures, rows.seeds, rows.positions)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Return all ranks' logits of some rows side by side. [n, width] -> [n, vocab]"""
        return self._by_torch.whole_logits(logits)

    def draw(
        self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
    ) -> Samples:
        """Draw a token for each row without filters; at temperature 0 take the likeliest.

        `logits`, [rows, width] in any float type, are this rank's; the rest is [rows] float32,
        int64 and int64. Every rank returns the same.
        """
        own = draw_candidates(logits, temperatures, seeds, positions, first_id=self._first_id)
        if self._group.size == 1:
            return Samples(own.tokens.long(), ~own.largest.isfinite())
        candidates = torch.stack((own.largest, own.scores, own.tokens.float()))
        return largest_candidate(self._group.all_gather(candidates))

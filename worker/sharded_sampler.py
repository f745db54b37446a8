"""Sampling when every rank has the logits of a part of the vocabulary.

Ranks exchange candidates, not logits: for each row the largest logit, and the token that wins on
this rank with what it wins by.

    rank 0   ids 0 … 65,535          best logit, value, id ─┐
    rank 1   ids 65,536 … 131,071    best logit, value, id ─┴► the largest value wins

Equal values go to the lowest rank, hence to the lowest id. A row with top-k, top-p or min-p needs
to know the whole distribution: its logits are gathered, and rank 0 alone decides, so that a sum
done in another order cannot make ranks disagree. The same goes for a row whose logits are edited.
Every rank computes the result from the same exchanged numbers, so tokens and failed rows are the
same everywhere.
"""

import torch
from torch import Tensor

from worker.parallel import TensorParallel
from worker.sampler import Samples, SamplingRows, perturbed_logits, sample, sample_filtered
from worker.shard import divide_vocabulary

_MAX_EXACT_FLOAT = 1 << 24
"""Token ids travel as float32, which holds all integers up to here."""


class ShardedSampler:
    """Chooses tokens together with the other ranks; alone, exactly as `worker.sampler` does."""

    def __init__(self, vocab_size: int, group: TensorParallel) -> None:
        assert vocab_size <= _MAX_EXACT_FLOAT, f"ids below {vocab_size} are not exact in float32"
        self._vocab_size = vocab_size
        self._group = group
        vocabulary = divide_vocabulary(vocab_size, rank=group.rank, size=group.size)
        self._first_id = vocabulary.ids.start

    def sample(self, logits: Tensor, rows: SamplingRows) -> Samples:
        """Choose a token for each row of this rank's logits. [rows, width] float32

        Padding in `logits` is -inf. Every rank returns the same.
        """
        if self._group.size == 1:
            return sample(logits, rows)
        best, winners = logits.max(dim=-1)
        values = best.clone()
        if len(rows.unfiltered):
            perturbed = perturbed_logits(logits, rows, first_id=self._first_id)
            values[rows.unfiltered], winners[rows.unfiltered] = perturbed.max(dim=-1)
        ids = winners + self._first_id
        if len(rows.filtered):
            whole = self.whole_logits(logits[rows.filtered])
            is_judge = self._group.rank == 0
            values[rows.filtered] = 0.0 if is_judge else float("-inf")
            if is_judge:
                ids[rows.filtered] = sample_filtered(whole, rows)
        return largest_candidate(self._group.all_gather(torch.stack((best, values, ids.float()))))

    def sample_whole(self, logits: Tensor, rows: SamplingRows) -> Samples:
        """Choose a token for each row of logits that every rank has whole. [rows, vocab] float32"""
        samples = sample(logits, rows)
        if self._group.size == 1:
            return samples
        own = torch.stack((samples.tokens.float(), samples.failed.float()))
        tokens, failed = self._group.all_gather(own)[0]
        return Samples(tokens.long(), failed > 0)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Return all ranks' logits of some rows side by side. [n, width] -> [n, vocab]"""
        if self._group.size == 1:
            return logits
        parts = self._group.all_gather(logits)
        return parts.transpose(0, 1).flatten(1)[:, : self._vocab_size]


def largest_candidate(candidates: Tensor) -> Samples:
    """Return each row's winner. [ranks, (best, value, id), rows]

    NaN counts as the largest, so a row that has one on any rank fails on all.
    """
    best, values, ids = candidates.unbind(1)
    winners = values.argmax(dim=0, keepdim=True)
    return Samples(ids.gather(0, winners).squeeze(0).long(), ~best.amax(dim=0).isfinite())

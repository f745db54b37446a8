"""Sampling on a GPU, without waiting for it: two kernels for a draw, four behind filters, and
three more where logits are edited.

Of several ranks each draws among its own tokens and they exchange three numbers a row, as
`worker.sharded_sampler` does. Rows with filters or edits need the whole distribution: if there are
any, every rank gathers the logits and draws from them, by the same kernels to the same result.
"""

import torch
from torch import Tensor

from worker.batch import SampledRows
from worker.kernels.drawing import draw_candidates, draw_tokens
from worker.kernels.editing import count_tokens, edited_logits
from worker.kernels.filtering import draw_filtered_tokens
from worker.parallel import TensorParallel
from worker.sampling_slots import SamplingSlots, Variant
from worker.shard import divide_vocabulary
from worker.sharded_sampler import largest_candidate
from worker.slot_sampler import FAILED


class CudaSampler:
    """`SlotSampler` of a GPU, whose `draw` can be captured in a graph."""

    def __init__(self, slots: SamplingSlots, vocab_size: int, group: TensorParallel) -> None:
        self._slots = slots
        self._vocab_size = vocab_size
        self._group = group
        vocabulary = divide_vocabulary(vocab_size, rank=group.rank, size=group.size)
        self._first_id = vocabulary.ids.start

    def sample(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Return each row's token, FAILED where it has none; keep them as last tokens. [n] int32"""
        reported = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
        variant = self._slots.variant(rows.host_slots)
        self.draw(logits, rows.slots, rows.indices, reported, variant=variant)
        return reported

    def draw(
        self,
        logits: Tensor,
        slots: Tensor,
        indices: Tensor,
        reported: Tensor,
        *,
        variant: Variant,
    ) -> None:
        """Do what `sample` does, with everything on the device.

        `slots` [n] and `indices` [n], where the tokens will stand, are int32 or int64; `reported`
        is [n] int32. `variant` is at least what the rows of `slots` take.
        """
        state = self._slots
        if variant >= Variant.FILTERED:
            whole = self.whole_logits(logits)
            if variant is Variant.EDITED:
                whole = edited_logits(whole, state.edits.tensors, slots, indices)
            draw_filtered_tokens(
                whole,
                state.temperatures,
                state.seeds,
                indices,
                slots=slots,
                last_tokens=state.last_tokens,
                reported=reported,
                top_k=state.top_k,
                top_p=state.top_p,
                min_p=state.min_p,
            )
            if variant is Variant.EDITED:
                count_tokens(state.last_tokens, state.edits.tensors, slots)
        elif self._group.size == 1:
            draw_tokens(
                logits,
                state.temperatures,
                state.seeds,
                indices,
                slots=slots,
                last_tokens=state.last_tokens,
                reported=reported,
            )
        else:
            self._draw_together(logits, slots.long(), indices, reported)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Return all ranks' logits of some rows side by side. [n, width] -> [n, vocab]"""
        if self._group.size == 1:
            return logits
        parts = self._group.all_gather(logits)
        return parts.transpose(0, 1).flatten(1)[:, : self._vocab_size]

    def _draw_together(
        self, logits: Tensor, slots: Tensor, indices: Tensor, reported: Tensor
    ) -> None:
        own = draw_candidates(
            logits,
            self._slots.temperatures.index_select(0, slots),
            self._slots.seeds.index_select(0, slots),
            indices,
            first_id=self._first_id,
        )
        candidates = torch.stack((own.largest, own.scores, own.tokens.float()))
        samples = largest_candidate(self._group.all_gather(candidates))
        self._slots.last_tokens.index_copy_(0, slots, samples.tokens)
        reported.copy_(samples.tokens.masked_fill(samples.failed, FAILED))

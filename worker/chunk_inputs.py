"""What a captured step with chunks reads: tokens side by side, each sequence a run of them.

A decode row is a chunk of one token. The buffers hold `tokens` tokens and `sequences` sequences;
what is left of the tokens is one more sequence, of padding, which lives in the pad block:

    tokens      d d d a a a a a b b b · · · ·
    sequences   0 1 2 └── 3 ──┘ └ 4 ┘ └─ the padding's, after those that are not there
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.batch import ChunkBatch
from worker.slot_tables import SlotTables
from worker.step_rows import Int32Array, StepRows
from worker.upload import Int64Array, upload, upload_bytes

_SAMPLED_BEFORE = -1
"""In place of a token that the host has not seen: the slot's last."""


class ChunkColumns(NamedTuple):
    """A step's rows as the model needs them, with padding."""

    tokens: Tensor
    """[tokens] int64"""
    positions: Tensor
    """[tokens] int64"""
    cache_positions: Tensor
    """[tokens] int64"""
    chunks: ChunkBatch
    """[sequences + 1] of them, the padding's last."""
    logit_rows: Tensor
    """[sequences] int64, the row of each sequence that samples; any other's is 0."""
    sampled_slots: Tensor
    """[sequences] int64, its slot; any other's is the pad slot."""
    sampled_indices: Tensor
    """[sequences] int64, where in prompt + output its token will stand."""


class ChunkInputs:
    """The buffers on the device, for steps of several sizes, one at a time."""

    def __init__(self, tables: SlotTables, *, max_tokens: int, max_sequences: int) -> None:
        self._tables = tables
        self._buffer = torch.zeros(
            upload_bytes(_sizes(max_tokens, max_sequences)),
            dtype=torch.uint8,
            device=tables.device,
        )

    def fill(
        self,
        num_tokens: int,
        num_sequences: int,
        ring: int,
        rows: StepRows,
        cache_positions: Int64Array,
    ) -> None:
        """Send a step's rows, for at most as many tokens and sequences. Nothing is waited for.

        `cache_positions` are those of its tokens. `rows` may be of no step, without any.
        """
        num_decode = len(rows.decode_slots)
        assert num_decode + len(rows.chunks) <= num_sequences, "more sequences than the graph has"
        counts = np.zeros(num_sequences, dtype=np.int32)
        counts[:num_decode] = 1
        slots = np.full(num_sequences + 1, self._tables.pad_slot, dtype=np.int32)
        slots[:num_decode] = rows.decode_slots
        lengths = np.zeros(num_sequences + 1, dtype=np.int32)
        lengths[:num_decode] = rows.decode_positions + 1
        positions = np.zeros(num_tokens, dtype=np.int32)
        positions[:num_decode] = rows.decode_positions
        known = np.zeros(num_tokens, dtype=np.int32)
        known[:num_decode] = _SAMPLED_BEFORE
        is_sampled = np.zeros(num_sequences, dtype=np.bool_)
        is_sampled[:num_decode] = True
        first = num_decode
        for index, chunk in enumerate(rows.chunks, start=num_decode):
            count = len(chunk.token_ids)
            counts[index], slots[index], lengths[index] = count, chunk.slot, chunk.end
            is_sampled[index] = chunk.is_last
            positions[first : first + count] = np.arange(chunk.start, chunk.end)
            known[first : first + count] = chunk.token_ids
            first += count
        starts = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
        # As many as it has tokens, so that even padding attends to something, if its table holds
        # as many.
        lengths[-1] = min(num_tokens - first, self._tables.capacity)
        all_cache_positions = np.full(num_tokens, self._tables.pad_cache_position, dtype=np.int64)
        all_cache_positions[:first] = cache_positions
        upload(
            (
                np.array([ring], dtype=np.int64),
                all_cache_positions,
                known,
                np.concatenate((rows.decode_slots, np.zeros(num_tokens - num_decode, np.int32))),
                positions,
                np.append(starts, np.int32(num_tokens)),
                lengths,
                slots,
                np.where(is_sampled, starts[1:] - 1, 0).astype(np.int32),
                np.where(is_sampled, slots[:-1], self._tables.pad_slot).astype(np.int32),
            ),
            self._tables.device,
            into=self._buffer,
        )

    def ring(self) -> Tensor:
        """Return where the step's results go. [1] int64, on the device"""
        return self._buffer[:8].view(torch.int64)

    def open(self, num_tokens: int, num_sequences: int) -> ChunkColumns:
        """Return the rows of a step, computed on the device from what was sent."""
        (
            _,
            cache_positions,
            known,
            token_slots,
            positions,
            starts,
            lengths,
            slots,
            logit_rows,
            sampled_slots,
        ) = self._columns(num_tokens, num_sequences)
        sampled_before = self._tables.last_tokens.index_select(0, token_slots)
        tables = self._tables.tables.index_select(0, slots)
        return ChunkColumns(
            tokens=torch.where(known < 0, sampled_before, known),
            positions=positions.long(),
            cache_positions=cache_positions,
            chunks=ChunkBatch(
                query_starts=starts,
                lengths=lengths,
                length_starts=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
                block_tables=tables,
                max_count=num_tokens,
                max_length=self._tables.capacity,
                is_fresh=False,
            ),
            logit_rows=logit_rows.long(),
            sampled_slots=sampled_slots.long(),
            sampled_indices=lengths[:-1].long(),
        )

    def _columns(self, num_tokens: int, num_sequences: int) -> list[Tensor]:
        sizes = _sizes(num_tokens, num_sequences)
        columns = []
        for index, size in enumerate(sizes):
            start = upload_bytes(sizes[:index])
            dtype = torch.int64 if index < _NUM_WIDE else torch.int32
            columns.append(self._buffer[start : start + size].view(dtype))
        return columns


_NUM_WIDE = 2
"""Columns of int64, before those of int32."""


def _sizes(num_tokens: int, num_sequences: int) -> list[int]:
    """Return the bytes of each column, in order."""
    per_sequence = [num_sequences + 2, num_sequences + 1, num_sequences + 1]
    int32s = [num_tokens] * 3 + per_sequence + [num_sequences] * 2
    return [8, 8 * num_tokens] + [4 * count for count in int32s]


def no_rows() -> StepRows:
    """Return the rows of no step: padding alone."""
    nothing: Int32Array = np.zeros(0, dtype=np.int32)
    return StepRows(
        step_id=0,
        num_rows=0,
        leaves=nothing,
        joins=(),
        swap_outs=nothing.reshape(0, 2),
        swap_ins=nothing.reshape(0, 2),
        copies=nothing.reshape(0, 2),
        new_blocks=nothing.reshape(0, 3),
        decode_rows=nothing,
        decode_slots=nothing,
        decode_positions=nothing,
        chunks=(),
        failures={},
    )

"""What a captured decode step reads: which slots decode, and at which positions.

A graph reads the same memory at every replay. The host sends a few numbers a row, in one copy; the
rest is looked up on the device:

    host      ring │ slots │ positions                (1, rows and rows numbers)
                       │
    device    tables[slots], last_tokens[slots] ──► tokens, lengths, cache positions, block tables

Rows past the step's own only fill up the bucket: they use the pad slot, write to the pad block and
attend to nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from worker.graph_store import RING
from worker.slot_tables import SlotTables
from worker.step_rows import Int32Array

_NO_POSITION = -1
"""In place of the position of a row that only fills up the bucket."""


class DecodeColumns(NamedTuple):
    """One bucket's rows as the model needs them."""

    tokens: Tensor
    """[rows] int64, fed in this step."""
    positions: Tensor
    """[rows] int64, theirs; 0 for padding."""
    lengths: Tensor
    """[rows] int32, tokens to attend to, the one fed included; 0 for padding."""
    cache_positions: Tensor
    """[rows] int64"""
    block_tables: Tensor
    """[rows, width] int32; what lies past a row's length means nothing."""


class DecodeInputs:
    """The buffers on the device, for one bucket at a time."""

    def __init__(self, tables: SlotTables, *, max_rows: int) -> None:
        self._tables = tables
        size = 2 * (1 + max_rows)
        self._buffer = torch.zeros(size, dtype=torch.int32, device=tables.device)
        """ring as two halves of int64, then slots and positions of the bucket's rows"""
        # One for each step that may be under way, and more: what is being sent must not change.
        self._sent = torch.zeros(
            RING, size, dtype=torch.int32, pin_memory=tables.device.type == "cuda"
        )
        self._sent_arrays: Int32Array = self._sent.numpy()
        # Zeros, since a kernel may look past a row's length, though not at what it finds there.
        self._row_tables = tables.tables.new_zeros(max_rows, tables.tables.shape[1])

    def fill(self, num_rows: int, ring: int, slots: Int32Array, positions: Int32Array) -> None:
        """Send a step's rows, at most `num_rows`, to that bucket.

        `ring` says where the step's results go (`worker.graph_store`); that of the last few steps
        was another. Nothing is waited for.
        """
        used, size = len(slots), 2 * (1 + num_rows)
        sent = self._sent_arrays[ring]
        sent[0] = ring
        sent[2 : 2 + used] = slots
        sent[2 + used : 2 + num_rows] = self._tables.pad_slot
        sent[2 + num_rows : 2 + num_rows + used] = positions
        sent[2 + num_rows + used : size] = _NO_POSITION
        self._buffer[:size].copy_(self._sent[ring, :size], non_blocking=True)

    def ring(self) -> Tensor:
        """Return where the step's results go. [1] int64, on the device"""
        return self._buffer[:2].view(torch.int64)

    def slots(self, num_rows: int) -> Tensor:
        """Return the slots of a bucket's rows. [rows] int32, on the device"""
        return self._column(num_rows, 0)

    def open(self, num_rows: int) -> DecodeColumns:
        """Return a bucket's rows, computed on the device from what was sent."""
        slots, positions = (self._column(num_rows, index) for index in range(2))
        state = self._tables
        if state.device.type == "cuda":
            # Imported here because Triton is there only where there are GPUs.
            from worker.kernels.decode_rows import open_rows  # noqa: PLC0415

            row_tables = self._row_tables[:num_rows]
            opened = open_rows(
                slots,
                positions,
                state.last_tokens,
                state.tables,
                row_tables=row_tables,
                block_size=state.block_size,
            )
            return DecodeColumns(*opened, row_tables)
        rows = slots.long()
        held = positions.clamp(min=0).long()
        tables = state.tables.index_select(0, rows)
        blocks = tables.gather(1, (held // state.block_size)[:, None]).squeeze(1)
        return DecodeColumns(
            tokens=state.last_tokens.index_select(0, rows),
            positions=held,
            lengths=positions + 1,
            cache_positions=blocks.long() * state.block_size + held % state.block_size,
            block_tables=tables,
        )

    def _column(self, num_rows: int, index: int) -> Tensor:
        start = 2 + num_rows * index
        return self._buffer[start : start + num_rows]

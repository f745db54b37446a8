"""What a captured decode step reads: a few numbers a row, and the slots' block tables.

A graph reads the same memory at every replay. The host sends, in one copy, which slots decode and
at which positions; block tables stay on the device and are told what has changed:

    host      ring │ slots │ positions                (1, rows and rows numbers)
                       │
    device    tables[slots], last_tokens[slots] ──► tokens, lengths, cache positions, block tables

Rows past the step's own only fill up the bucket: they use the pad slot, write to the pad block and
attend to nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.step_rows import Int32Array
from worker.upload import upload, upload_bytes

_NO_POSITION = -1
"""In place of the position of a row that only fills up the bucket."""
RING = 4
"""Results kept on the device: more than the steps that may be under way."""


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
    """The buffers on the device, and the slots' block tables there."""

    def __init__(
        self,
        last_tokens: Tensor,
        *,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        pad_block: int,
    ) -> None:
        """`last_tokens` is [slots + 1] int64, the pad slot last."""
        assert (pad_block + 1) * block_size < 2**31, "cache positions are counted in int32"
        self._last_tokens = last_tokens
        self._max_rows = max_rows
        self._block_size = block_size
        self._pad_slot = len(last_tokens) - 1
        self._device = device = last_tokens.device
        self._columns = torch.zeros(
            upload_bytes([8, 4 * max_rows, 4 * max_rows]), dtype=torch.uint8, device=device
        )
        self._tables = torch.zeros(len(last_tokens), max_blocks, dtype=torch.int32, device=device)
        self._tables[self._pad_slot] = pad_block
        # Zeros, since a kernel may look past a row's length, though not at what it finds there.
        self._row_tables = self._tables.new_zeros(max_rows, max_blocks)

    def set_blocks(self, entries: Sequence[tuple[int, int, Int32Array]]) -> None:
        """Write (slot, first index in its table, blocks) to the tables, if there are any."""
        if not entries:
            return
        width = self._tables.shape[1]
        places = [
            np.arange(start := slot * width + first, start + len(blocks), dtype=np.int64)
            for slot, first, blocks in entries
        ]
        index, values = upload(
            (np.concatenate(places), np.concatenate([blocks for _, _, blocks in entries])),
            self._device,
        )
        self._tables.view(-1).index_copy_(0, index, values)

    def fill(self, num_rows: int, ring: int, slots: Int32Array, positions: Int32Array) -> None:
        """Send a step's rows, at most `num_rows`, to that bucket.

        `ring` says where the step's results go, below RING. Nothing is waited for.
        """
        padding = (0, num_rows - len(slots))
        upload(
            (
                np.array([ring], dtype=np.int64),
                np.pad(slots, padding, constant_values=self._pad_slot),
                np.pad(positions, padding, constant_values=_NO_POSITION),
            ),
            self._device,
            into=self._columns,
        )

    def ring(self) -> Tensor:
        """Return where the step's results go. [1] int64, on the device"""
        return self._columns[:8].view(torch.int64)

    def slots(self, num_rows: int) -> Tensor:
        """Return the slots of a bucket's rows. [rows] int32, on the device"""
        return self._column(num_rows, 0)

    def open(self, num_rows: int) -> DecodeColumns:
        """Return a bucket's rows, computed on the device from what was sent."""
        slots, positions = (self._column(num_rows, index) for index in range(2))
        if self._device.type == "cuda":
            # Imported here because Triton is there only where there are GPUs.
            from worker.kernels.decode_rows import open_rows  # noqa: PLC0415

            row_tables = self._row_tables[:num_rows]
            opened = open_rows(
                slots,
                positions,
                self._last_tokens,
                self._tables,
                row_tables=row_tables,
                block_size=self._block_size,
            )
            return DecodeColumns(*opened, row_tables)
        rows = slots.long()
        held = positions.clamp(min=0).long()
        tables = self._tables.index_select(0, rows)
        blocks = tables.gather(1, (held // self._block_size)[:, None]).squeeze(1)
        return DecodeColumns(
            tokens=self._last_tokens.index_select(0, rows),
            positions=held,
            lengths=positions + 1,
            cache_positions=blocks.long() * self._block_size + held % self._block_size,
            block_tables=tables,
        )

    def _column(self, num_rows: int, index: int) -> Tensor:
        start = upload_bytes([8] + [4 * num_rows] * index)
        return self._columns[start : start + 4 * num_rows].view(torch.int32)


def changed_blocks(
    joins: Sequence[int], new_blocks: Int32Array, block_tables: Int32Array, num_held: Int32Array
) -> list[tuple[int, int, Int32Array]]:
    """Return what a plan changed in the block tables: (slot, first index, blocks).

    `joins` are the slots taken, `new_blocks` is [new, 3]; the host's tables are those after both.
    """
    entries = [(slot, 0, block_tables[slot, : num_held[slot]]) for slot in joins]
    entries += [
        (int(slot), int(index), block_tables[slot, index : index + 1])
        for slot, index, _ in new_blocks
        if slot not in joins
    ]
    return entries

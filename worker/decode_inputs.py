"""What a captured decode step reads: one buffer on the device, filled from the host by one copy.

A graph reads the same memory at every replay. Each bucket sees the buffer's beginning as

    slots │ positions │ lengths │ cache positions │ block tables
    rows    rows        rows      rows              rows · width          int32

Rows past the step's own only fill up the bucket: they use the pad slot, write to the pad block and
attend to nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.step_rows import Int32Array

_NUM_COLUMNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeColumns:
    """One bucket's view of the buffer, all int32."""

    slots: Tensor
    """[rows]"""
    positions: Tensor
    """[rows] position of the token fed."""
    lengths: Tensor
    """[rows] tokens to attend to, itself included: the index of the token to sample."""
    cache_positions: Tensor
    """[rows]"""
    block_tables: Tensor
    """[rows, width]"""


class DecodeInputs:
    """The buffer, on the host and on the device."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        pad_slot: int,
        pad_block: int,
        device: torch.device,
    ) -> None:
        assert (pad_block + 1) * block_size < 2**31, "cache positions are int32"
        self._max_blocks = max_blocks
        self._block_size = block_size
        self._pad_slot = pad_slot
        self._pad_block = pad_block
        size = max_rows * (_NUM_COLUMNS + max_blocks)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._host_array: Int32Array = self._host.numpy()

    def columns(self, num_rows: int) -> DecodeColumns:
        """Return the device's view of a bucket of `num_rows`."""
        fields = self._device[: num_rows * _NUM_COLUMNS].view(_NUM_COLUMNS, num_rows)
        tables = self._device[num_rows * _NUM_COLUMNS : self._size(num_rows)]
        slots, positions, lengths, cache_positions = fields
        return DecodeColumns(
            slots=slots,
            positions=positions,
            lengths=lengths,
            cache_positions=cache_positions,
            block_tables=tables.view(num_rows, self._max_blocks),
        )

    def fill(
        self, num_rows: int, slots: Int32Array, positions: Int32Array, block_tables: Int32Array
    ) -> None:
        """Put a step's rows, at most `num_rows`, into that bucket and send it to the device.

        `block_tables` is the host's [slots, max_blocks], -1 where there is no block. The copy is
        not waited for; the step's results must be, before the buffer is filled again.
        """
        size, used = self._size(num_rows), len(slots)
        split = num_rows * _NUM_COLUMNS
        fields = self._host_array[:split].reshape(_NUM_COLUMNS, num_rows)
        tables = self._host_array[split:size].reshape(num_rows, self._max_blocks)

        blocks, offsets = np.divmod(positions, np.int32(self._block_size))
        width = int(blocks.max(initial=0)) + 1
        # A row's table may end before the longest's: -1 there, which is read no more than the
        # leavings of earlier steps past the width, but which is no block.
        np.maximum(block_tables[slots, :width], 0, out=tables[:used, :width])
        fields[0, :used] = slots
        fields[1, :used] = positions
        fields[2, :used] = positions + np.int32(1)
        fields[3, :used] = block_tables[slots, blocks] * np.int32(self._block_size) + offsets

        fields[0, used:] = self._pad_slot
        fields[1:3, used:] = 0
        fields[3, used:] = self._pad_block * self._block_size
        self._device[:size].copy_(self._host[:size], non_blocking=True)

    def _size(self, num_rows: int) -> int:
        return num_rows * (_NUM_COLUMNS + self._max_blocks)

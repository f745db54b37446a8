"""The slots' block tables and last tokens on the device, where captured steps look them up."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.step_rows import Int32Array
from worker.upload import upload


class SlotTables:
    """Block tables of all slots and of a pad slot, which follow what plans say."""

    def __init__(
        self, last_tokens: Tensor, *, max_blocks: int, block_size: int, pad_block: int
    ) -> None:
        """`last_tokens` is [slots + 1] int64, the pad slot last. The sampler writes it."""
        assert (pad_block + 1) * block_size < 2**31, "cache positions are counted in int32"
        self.last_tokens = last_tokens
        self.block_size = block_size
        self.pad_slot = len(last_tokens) - 1
        self.pad_cache_position = pad_block * block_size
        self.tables = torch.zeros(
            len(last_tokens), max_blocks, dtype=torch.int32, device=last_tokens.device
        )
        """[slots + 1, max_blocks]; what lies past a slot's blocks is some block."""
        self.tables[self.pad_slot] = pad_block

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.tables.device

    @property
    def capacity(self) -> int:
        """Tokens that a slot's table holds."""
        return self.tables.shape[1] * self.block_size

    def set_blocks(self, entries: Sequence[tuple[int, int, Int32Array]]) -> None:
        """Write (slot, first index in its table, blocks), if there are any."""
        if not entries:
            return
        width = self.tables.shape[1]
        places = [
            np.arange(start := slot * width + first, start + len(blocks), dtype=np.int64)
            for slot, first, blocks in entries
        ]
        index, values = upload(
            (np.concatenate(places), np.concatenate([blocks for _, _, blocks in entries])),
            self.device,
        )
        self.tables.view(-1).index_copy_(0, index, values)


def changed_blocks(
    joins: Sequence[int], new_blocks: Int32Array, block_tables: Int32Array, num_held: Int32Array
) -> list[tuple[int, int, Int32Array]]:
    """Return what a plan changed in the block tables: (slot, first index, blocks).

    `joins` are the slots taken, `new_blocks` is [new, 3]; the host's tables are those after both.
    """
    entries = [(slot, 0, block_tables[slot, : num_held[slot]]) for slot in joins]
    entries += [
        (slot, index, block_tables[slot, index : index + 1])
        for slot, index, _ in new_blocks.tolist()
        if slot not in joins
    ]
    return entries

"""The paged KV cache of one rank: how many blocks fit, their memory, and copies between them.

Keys come first, then values; an attention back end states which layout its kernels read:

    heads first     [layers, 2, kv_heads, num_blocks + 1, block_size, head_dim]
    blocks first    [layers, 2, num_blocks + 1, block_size, kv_heads, head_dim]

Heads first, a head's tokens within a block lie together, so that gathering a sequence for one head
copies whole runs of block_size · head_dim numbers. Blocks first, all of a token's heads lie
together, which is what the libraries of paged attention want.

Block `num_blocks` is the pad block: rows shorter than their neighbours point there, and rows that
only fill up a batch write there.
"""

import enum
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from protocol.errors import ConfigError

MAX_CPU_CACHE_BYTES = 2 << 30


class KVLayout(enum.Enum):
    """The order of the cache's dimensions. See above."""

    HEADS_FIRST = enum.auto()
    BLOCKS_FIRST = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """Sizes of one rank's share of the cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers."""
        per_layer = 2 * self.num_kv_heads * self.block_size * self.head_dim
        return self.num_layers * per_layer * dtype.itemsize


class KVCache:
    """The cache's memory. Attention back ends read and write `data`; copies go through here.

    Raises torch.OutOfMemoryError if the device cannot hold it.
    """

    def __init__(
        self,
        shape: KVCacheShape,
        num_blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layout: KVLayout = KVLayout.HEADS_FIRST,
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.layout = layout
        heads, blocks = shape.num_kv_heads, num_blocks + 1
        if layout is KVLayout.HEADS_FIRST:
            sizes = (heads, blocks, shape.block_size)
            self._block_dim = 3
        else:
            sizes = (blocks, shape.block_size, heads)
            self._block_dim = 2
        self.data: Tensor = torch.empty(
            shape.num_layers, 2, *sizes, shape.head_dim, dtype=dtype, device=device
        )
        if device.type == "cpu":
            # Not all of it: the pages of a block are then only taken once it is written.
            self.clear_blocks([self.pad_block])
        else:
            self.data.zero_()

    @property
    def pad_block(self) -> int:
        """The block that no sequence holds."""
        return self.num_blocks

    def block(self, block: int) -> Tensor:
        """Return a view of one block in all layers."""
        return self.data.select(self._block_dim, block)

    def clear_blocks(self, blocks: Iterable[int]) -> None:
        """Zero blocks."""
        for block in blocks:
            self.block(block).zero_()

    def clear_tail(self, block: int, first: int) -> None:
        """Zero a block from its position `first` on."""
        tail = self.block(block)
        tail.narrow(self._block_dim, first, self.shape.block_size - first).zero_()

    def copy_blocks(self, copies: Sequence[Sequence[int]]) -> None:
        """Copy blocks, (source, target) after (source, target), in this order."""
        for source, target in copies:
            self.block(target).copy_(self.block(source))


def cpu_num_blocks(block_bytes: int, *, tp: int, available_bytes: int) -> int:
    """Return how many blocks a rank gets on CPU when `--num-blocks` does not say.

    All ranks together take a quarter of the memory available, at most 2 GiB. Raises ConfigError if
    that does not hold one block.
    """
    budget = min(MAX_CPU_CACHE_BYTES, available_bytes // 4) // tp
    num_blocks = budget // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"The KV cache may take {budget} bytes here, less than one block ({block_bytes} "
            f"bytes): free some memory, or lower --block-size."
        )
    return num_blocks


def require_cpu_memory(num_blocks: int, block_bytes: int, *, available_bytes: int) -> None:
    """Raise ConfigError for a cache that does not fit: the system would only say so by killing."""
    needed = num_blocks * block_bytes
    if needed > available_bytes:
        raise ConfigError(
            f"The KV cache of {num_blocks} blocks needs {needed / (1 << 30):.1f} GiB, and "
            f"{available_bytes / (1 << 30):.1f} GiB are free: lower --num-blocks, or leave it out."
        )


def available_memory_bytes() -> int:
    """Return the bytes that can be taken without swapping or meeting the cgroup's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available

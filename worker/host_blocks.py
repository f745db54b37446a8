"""Blocks of the KV cache in the host's memory, where preempted sequences wait.

A host block holds one block of all layers, together. It moves by way of a block's worth of memory
on the device that is set aside for it, so that moving never runs out of memory; everything is on
the stream that computes, in plan order.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from protocol.errors import ConfigError
from worker.kv_cache import KVCache

_MEASURED_BLOCKS = 8


class HostBlocks:
    """Host memory for the blocks of one cache."""

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        """Take the memory, pinned where there is a GPU. Raises ConfigError if there is too little.

        Of pinned memory all is taken at once.
        """
        self._cache = cache
        self.num_blocks = num_blocks
        one = cache.block(cache.pad_block)
        self._staging = torch.empty(one.shape, dtype=one.dtype, device=one.device)
        try:
            self._data: Tensor = torch.empty(
                num_blocks, *one.shape, dtype=one.dtype, pin_memory=one.is_cuda
            )
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"--swap-space: the host has no room for {num_blocks} blocks of "
                f"{self._staging.nbytes} bytes; lower it."
            ) from error

    def move_out(self, moves: Sequence[Sequence[int]]) -> None:
        """Copy blocks, (block, host block) each."""
        for block, host_block in moves:
            self._staging.copy_(self._cache.block(block))
            self._data[host_block].copy_(self._staging, non_blocking=True)

    def move_in(self, moves: Sequence[Sequence[int]]) -> None:
        """Copy blocks back, (host block, block) each."""
        for host_block, block in moves:
            self._staging.copy_(self._data[host_block], non_blocking=True)
            self._cache.block(block).copy_(self._staging)

    def measure(self) -> float:
        """Return the seconds that a block takes one way. Uses the pad block and host blocks."""
        count = min(_MEASURED_BLOCKS, self.num_blocks)
        pad = self._cache.pad_block
        seconds = 0.0
        for _ in range(2):  # the first time also pays for pages and for set-up
            self._wait()
            started = time.perf_counter()
            self.move_out([(pad, host_block) for host_block in range(count)])
            self.move_in([(host_block, pad) for host_block in range(count)])
            self._wait()
            seconds = time.perf_counter() - started
        return seconds / (2 * count)

    def _wait(self) -> None:
        if self._staging.is_cuda:
            torch.cuda.synchronize(self._staging.device)

"""Ranks as threads of one process: real shards and exchanges, without processes or sockets."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
PATIENCE_S = 60.0


class _Table:
    """What the ranks lay down for each other."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)


class ThreadRank:
    """One rank's `TensorParallel`; `exchanged` counts the numbers it has given away."""

    def __init__(self, table: _Table, rank: int) -> None:
        self._table = table
        self.rank = rank
        self.size = len(table.parts)
        self.exchanged = 0

    def _all_parts(self, part: Tensor) -> list[Tensor]:
        self.exchanged += part.numel()
        self._table.parts[self.rank] = part
        self._table.barrier.wait()
        parts = [other.clone() for other in self._table.parts if other is not None]
        self._table.barrier.wait()
        assert {other.shape for other in parts} == {part.shape}
        return parts

    def all_reduce(self, part: Tensor) -> Tensor:
        return part.copy_(torch.stack(self._all_parts(part)).sum(0))

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.stack(self._all_parts(part))


def thread_ranks(size: int) -> list[ThreadRank]:
    """Return the ranks of a group; each must run in a thread of its own (`on_all`)."""
    table = _Table(size)
    return [ThreadRank(table, rank) for rank in range(size)]


def on_all(ranks: Iterable[Callable[[], Result]]) -> list[Result]:
    """Run every rank's part at once; return their results, or raise what the first raised."""
    calls = list(ranks)
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result() for future in futures]

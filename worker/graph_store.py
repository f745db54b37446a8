"""Captured steps of one rank, their common memory, and the ring that their results are left in.

Two steps may be under way, and results leave on a stream of their own while the next step runs: so
a step leaves them where neither of the next two writes.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

RING = 4
"""Results kept: more than the steps that may be under way."""


class GraphStore:
    """CUDA graphs by name. They share their memory, so only one runs at a time."""

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        """`max_rows` is the most tokens that a step samples."""
        self._results = torch.zeros(RING, max_rows, dtype=torch.int32, device=device)
        self._next = 0
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def __contains__(self, name: Hashable) -> bool:
        """Return whether a graph has been captured."""
        return name in self._graphs

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._graphs)

    @property
    def free_ring(self) -> int:
        """Where the next step may leave its results: nothing is read from there any more."""
        return self._next

    def take_ring(self) -> int:
        """Return where this step leaves its results; the next one will leave them elsewhere."""
        ring = self._next
        self._next = (ring + 1) % RING
        return ring

    def keep(self, ring: Tensor, reported: Tensor) -> None:
        """Leave a step's results, as part of it. `ring` is [1] int64, `reported` [rows] int32"""
        self._results[:, : len(reported)].index_copy_(0, ring, reported[None])

    def results(self, ring: int, num_rows: int) -> Tensor:
        """Return the results of a step that took `ring`, valid for RING steps. [rows] int32"""
        return self._results[ring, :num_rows]

    def capture(self, name: Hashable, step: Callable[[], None]) -> None:
        """Run a step once, then capture it. It must only touch what padding may touch."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            step()  # libraries set themselves up; that cannot be captured
            # Not torch.cuda.graph: it collects garbage, a fifth of a second for each graph.
            graph.capture_begin(pool=self._pool(), capture_error_mode="thread_local")
            step()
            graph.capture_end()
        # What was sent for it may then be sent anew.
        stream.synchronize()
        self._graphs[name] = graph

    def replay(self, name: Hashable) -> None:
        """Run a captured step. Nothing is waited for."""
        self._graphs[name].replay()

    def _pool(self) -> "torch.cuda._POOL_HANDLE | None":
        return next(iter(self._graphs.values())).pool() if self._graphs else None

"""Captured steps of one rank, their common memory, and the ring that their results are left in.

Two steps may be under way, and results leave on a stream of their own while the next step runs: so
a step leaves them where neither of the next two writes.
"""

import contextlib
import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

RING = 4
"""Results kept: more than the steps that may be under way."""


log = logging.getLogger(__name__)


class GraphStore:
    """CUDA graphs by name. They share their memory, so only one runs at a time.

    Once there is no memory for a graph, no further one is captured: what has none runs eagerly.
    """

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        """`max_rows` is the most tokens that a step samples."""
        self._results = torch.zeros(RING, max_rows, dtype=torch.int32, device=device)
        self._next = 0
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._is_full = False

    @property
    def is_full(self) -> bool:
        """Whether there was no memory for a graph."""
        return self._is_full

    def wants(self, name: Hashable) -> bool:
        """Return whether a graph is still to be captured."""
        return name not in self._graphs and not self._is_full

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
        """Run a step once, then capture it. It must only touch what padding may touch.

        There may be no memory for it: then the step stays without a graph.
        """
        try:
            self._graphs[name] = self._captured(step)
        except torch.OutOfMemoryError:
            self._is_full = True
            log.warning("no memory for further graphs count=%d", len(self._graphs))

    def run(self, name: Hashable, step: Callable[[], None]) -> None:
        """Replay a step's graph; run the step itself if there is none. Nothing is waited for."""
        graph = self._graphs.get(name)
        if graph is None:
            step()
        else:
            graph.replay()

    def _captured(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            step()  # libraries set themselves up; that cannot be captured
            # Not torch.cuda.graph: it collects garbage, a fifth of a second for each graph.
            graph.capture_begin(pool=self._pool(), capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what went wrong is known already
                    graph.capture_end()
                raise
            graph.capture_end()
        # What was sent for it may then be sent anew.
        stream.synchronize()
        return graph

    def _pool(self) -> "torch.cuda._POOL_HANDLE | None":
        return next(iter(self._graphs.values())).pool() if self._graphs else None

"""Decode steps as CUDA graphs: from the slots' last tokens to the next ones in one launch.

A graph is captured for each of a few row counts, its buckets; a step runs in the smallest that
holds its rows. What is inside:

    slots ─► tokens, block tables ─► model ─► logits ─► draw ─► last tokens, ring of results
                                       │
                                       └─► hidden states, from which the few steps that want
                                           log-probabilities compute their logits again

Two steps may be under way, and results leave on a stream of their own while the next step runs: so
they are kept in a ring. A bucket's graph for rows with filters is captured when it is first needed,
which depends on plans alone, so that all ranks do it in the same step. Steps with chunks run
eagerly.
"""

import bisect
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from worker.attention.base import DecodeRows, GraphableBackend
from worker.decode_inputs import RING, DecodeInputs
from worker.models.causal_lm import CausalLM
from worker.step_rows import Int32Array

log = logging.getLogger(__name__)


def graph_buckets(max_rows: int) -> tuple[int, ...]:
    """Return the row counts to capture: dense where a step is short, up to `max_rows`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def choose_bucket(buckets: Sequence[int], num_decode: int, num_chunks: int) -> int | None:
    """Return the bucket of a step's shape, or None if it has to run eagerly."""
    if num_chunks or not 0 < num_decode <= buckets[-1]:
        return None
    return buckets[bisect.bisect_left(buckets, num_decode)]


class Draw(Protocol):
    """Draws tokens in a way that can be captured (`worker.cuda_sampler.CudaSampler.draw`)."""

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        indices: Tensor,
        reported: Tensor,
        *,
        has_filters: bool,
    ) -> None:
        """logits [n, width] in any float type, then [n] int32 each."""
        ...


class Graph(NamedTuple):
    """What makes one graph differ from another."""

    bucket: int
    has_filters: bool


class Replay(NamedTuple):
    """What a replayed step leaves. `bucket` is the graph's row count."""

    reported: Tensor
    """[rows] int32 the sampled tokens, FAILED where a row failed; valid for RING steps."""
    hidden: Tensor
    """[bucket, hidden] before the last norm; valid until the next replay."""


class DecodeGraphs:
    """The graphs of one rank. They share their memory, so only one runs at a time."""

    def __init__(
        self,
        model: CausalLM,
        attention: GraphableBackend,
        inputs: DecodeInputs,
        draw: Draw,
        *,
        buckets: Sequence[int],
        device: torch.device,
    ) -> None:
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._draw = draw
        self._buckets = tuple(buckets)
        self._results = torch.zeros(RING, buckets[-1], dtype=torch.int32, device=device)
        self._next_result = 0
        self._hidden: Tensor | None = None
        self._graphs: dict[Graph, torch.cuda.CUDAGraph] = {}

    def capture(self) -> None:
        """Capture every bucket, largest first so that the others fit into its memory."""
        started = time.monotonic()
        for bucket in reversed(self._buckets):
            self._capture(Graph(bucket, has_filters=False))
        log.info(
            "graphs captured count=%d largest=%d seconds=%.1f",
            *(len(self._graphs), self._buckets[-1], time.monotonic() - started),
        )

    def bucket(self, num_decode: int, num_chunks: int) -> int | None:
        """Return the bucket that a step runs in, or None if it has to run eagerly."""
        return choose_bucket(self._buckets, num_decode, num_chunks)

    def replay(
        self, bucket: int, slots: Int32Array, positions: Int32Array, *, has_filters: bool
    ) -> Replay:
        """Run a decode step. Nothing is waited for, unless its graph is needed for the first time.

        `positions` are those of the tokens fed, whose blocks the inputs' tables hold.
        """
        graph = Graph(bucket, has_filters)
        if graph not in self._graphs:
            self._capture(graph)
        ring = self._next_result
        self._next_result = (ring + 1) % RING
        self._inputs.fill(bucket, ring, slots, positions)
        self._run(graph)
        assert self._hidden is not None, "graphs are captured before they are replayed"
        return Replay(self._results[ring, : len(slots)], self._hidden[:bucket])

    def run_eagerly(self, graph: Graph) -> None:
        """Do what the graph does, from the inputs as they are."""
        inputs, bucket = self._inputs, graph.bucket
        rows = inputs.open(bucket)
        attention = self._attention.start_decode(
            DecodeRows(
                cache_positions=rows.cache_positions,
                lengths=rows.lengths,
                block_tables=rows.block_tables,
            )
        )
        hidden: Tensor = self._model(rows.tokens, rows.positions, attention)
        reported = torch.empty_like(rows.lengths)
        self._draw(
            self._model.logits(hidden),
            inputs.slots(bucket),
            rows.lengths,
            reported,
            has_filters=graph.has_filters,
        )
        self._results[:, :bucket].index_copy_(0, inputs.ring(), reported[None])
        if self._hidden is None:
            # The first run is the largest bucket's, before any capture.
            self._hidden = torch.empty_like(hidden)
        self._hidden[:bucket].copy_(hidden)

    def _run(self, graph: Graph) -> None:
        self._graphs[graph].replay()

    def _capture(self, graph: Graph) -> None:
        started = time.monotonic()
        empty = np.zeros(0, dtype=np.int32)
        # Where the next step's results go nothing else is still read from.
        self._inputs.fill(graph.bucket, self._next_result, empty, empty)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self.run_eagerly(graph)  # libraries set themselves up; that cannot be captured
            # Not torch.cuda.graph: it collects garbage, a fifth of a second for each graph.
            captured.capture_begin(pool=self._pool(), capture_error_mode="thread_local")
            self.run_eagerly(graph)
            captured.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._graphs[graph] = captured
        log.debug(
            "graph captured rows=%d filters=%s seconds=%.2f",
            *(graph.bucket, graph.has_filters, time.monotonic() - started),
        )

    def _pool(self) -> "torch.cuda._POOL_HANDLE | None":
        return next(iter(self._graphs.values())).pool() if self._graphs else None

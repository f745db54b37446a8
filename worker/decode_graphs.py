"""Decode steps as CUDA graphs: from the slots' last tokens to the next ones in one launch.

A graph is captured for each of a few row counts, its buckets; a step runs in the smallest that
holds its rows. What is inside:

    slots ─► tokens, block tables ─► model ─► logits ─► draw ─► last tokens, ring of results
                                       │
                                       └─► hidden states, from which the few steps that want
                                           log-probabilities compute their logits again

A bucket's graph for rows with filters, and that for edited logits, is captured when it is first
needed, which depends on plans alone, so that all ranks do it in the same step.
"""

import bisect
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from protocol.errors import ConfigError
from worker.attention.base import DecodeRows, GraphableBackend
from worker.decode_inputs import DecodeInputs
from worker.graph_store import GraphStore
from worker.models.causal_lm import CausalLM
from worker.sampling_slots import Variant
from worker.step_rows import Int32Array

log = logging.getLogger(__name__)


class Draw(Protocol):
    """Draws tokens in a way that can be captured (`worker.cuda_sampler.CudaSampler.draw`)."""

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        indices: Tensor,
        reported: Tensor,
        *,
        variant: Variant,
    ) -> None:
        """logits [n, width] in any float type, then [n], of int32 or int64, and [n] int32."""
        ...


class DecodeGraph(NamedTuple):
    """What makes one graph differ from another."""

    bucket: int
    variant: Variant


class Replay(NamedTuple):
    """What a replayed step leaves."""

    reported: Tensor
    """[sampled] int32 the tokens, FAILED where a row failed (`GraphStore.results`)."""
    hidden: Tensor
    """[as many as the graph samples, hidden] before the last norm; until the next replay."""


class DecodeGraphs:
    """The graphs of decode steps of one rank."""

    def __init__(
        self,
        model: CausalLM,
        attention: GraphableBackend,
        inputs: DecodeInputs,
        draw: Draw,
        store: GraphStore,
        *,
        buckets: Sequence[int],
    ) -> None:
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._draw = draw
        self._store = store
        self._buckets = tuple(buckets)
        self._hidden: Tensor | None = None

    def capture(self) -> None:
        """Capture every bucket, largest first so that the others fit into its memory.

        Raises ConfigError if there is no memory for them.
        """
        started = time.monotonic()
        for bucket in reversed(self._buckets):
            self._capture(DecodeGraph(bucket, variant=Variant.PLAIN))
        if self._store.is_full:
            raise ConfigError(
                "There is no memory left for CUDA graphs: lower --gpu-memory-utilization or "
                "--max-num-seqs, or give --enforce-eager."
            )
        log.info(
            "graphs captured count=%d largest=%d seconds=%.1f",
            *(len(self._buckets), self._buckets[-1], time.monotonic() - started),
        )

    def bucket(self, num_rows: int) -> int | None:
        """Return the bucket that a step of decode rows runs in; None if it has too many or none."""
        if not 0 < num_rows <= self._buckets[-1]:
            return None
        return self._buckets[bisect.bisect_left(self._buckets, num_rows)]

    def replay(
        self, bucket: int, slots: Int32Array, positions: Int32Array, variant: Variant
    ) -> Replay:
        """Run a decode step. Nothing is waited for, unless its graph is needed for the first time.

        `positions` are those of the tokens fed, whose blocks the slots' tables hold.
        """
        graph = DecodeGraph(bucket, variant)
        if self._store.wants(graph):
            self._capture(graph)
        ring = self._store.take_ring()
        self._inputs.fill(bucket, ring, slots, positions)
        self._store.run(graph, partial(self.run_eagerly, graph))
        assert self._hidden is not None, "a step has been run"
        return Replay(self._store.results(ring, len(slots)), self._hidden[:bucket])

    def run_eagerly(self, graph: DecodeGraph) -> None:
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
            variant=graph.variant,
        )
        self._store.keep(inputs.ring(), reported)
        if self._hidden is None:
            # The first run is the largest bucket's, before any capture.
            # Wide enough for all buckets: only few rows are float32.
            self._hidden = torch.empty_like(hidden, dtype=torch.float32)
        self._hidden[:bucket].copy_(hidden)

    def _capture(self, graph: DecodeGraph) -> None:
        empty = np.zeros(0, dtype=np.int32)
        self._inputs.fill(graph.bucket, self._store.free_ring, empty, empty)
        self._store.capture(graph, partial(self.run_eagerly, graph))
        log.debug("graph captured rows=%d variant=%d", *graph)

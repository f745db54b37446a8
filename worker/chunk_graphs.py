"""Short steps with chunks as CUDA graphs, where launching the kernels takes longer than they do.

A graph is captured for a number of tokens and of sequences; a step runs in the smallest of both
that holds it, the rest being padding. All its rows are chunks, decode rows those of one token, so
that attention is one call whatever the mix (`worker.chunk_inputs`).

A size is captured once it has come up CAPTURED_AT times: a capture takes as long as many steps.
That depends on plans alone, so that all ranks do it in the same step. Long steps hide launches.
"""

import bisect
import logging
import time
from collections import Counter
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.attention.base import GraphableBackend
from worker.chunk_inputs import ChunkInputs, no_rows
from worker.decode_graphs import Draw, Replay
from worker.graph_sizes import CHUNK_TOKENS, chunk_sequences
from worker.graph_store import GraphStore
from worker.models.causal_lm import CausalLM
from worker.sampling_slots import Variant
from worker.step_rows import StepRows
from worker.upload import Int64Array

CAPTURED_AT = 3

log = logging.getLogger(__name__)


class ChunkGraph(NamedTuple):
    """What makes one graph differ from another."""

    num_tokens: int
    num_sequences: int
    variant: Variant


class ChunkGraphs:
    """The graphs of steps with chunks of one rank."""

    def __init__(
        self,
        model: CausalLM,
        attention: GraphableBackend,
        inputs: ChunkInputs,
        draw: Draw,
        store: GraphStore,
        *,
        max_sequences: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._draw = draw
        self._store = store
        self._sequences = chunk_sequences(max_sequences)
        self._seen: Counter[ChunkGraph] = Counter()
        self._hidden: Tensor | None = None

    def choose(self, rows: StepRows, variant: Variant) -> ChunkGraph | None:
        """Return the graph that a step runs in, or None if it has to run eagerly.

        To be asked once for each step with chunks.
        """
        num_tokens = len(rows.decode_slots) + sum(len(chunk.token_ids) for chunk in rows.chunks)
        num_sequences = len(rows.decode_slots) + len(rows.chunks)
        if num_tokens > CHUNK_TOKENS[-1] or num_sequences > self._sequences[-1]:
            return None
        if variant is Variant.EDITED:
            return None  # too rare for the memory of so many graphs
        graph = ChunkGraph(
            CHUNK_TOKENS[bisect.bisect_left(CHUNK_TOKENS, num_tokens)],
            self._sequences[bisect.bisect_left(self._sequences, num_sequences)],
            variant,
        )
        self._seen[graph] += 1
        return graph if self._seen[graph] >= CAPTURED_AT else None

    def replay(self, graph: ChunkGraph, rows: StepRows, cache_positions: Int64Array) -> Replay:
        """Run a step. Nothing is waited for, unless its graph has to be captured.

        Results are those of all its sequences, whether they sample or not.
        """
        if self._store.wants(graph):
            self._capture(graph)
        ring = self._store.take_ring()
        self._inputs.fill(graph.num_tokens, graph.num_sequences, ring, rows, cache_positions)
        self._store.run(graph, partial(self.run_eagerly, graph))
        assert self._hidden is not None, "a step has been run"
        reported = self._store.results(ring, len(rows.decode_slots) + len(rows.chunks))
        return Replay(reported, self._hidden[: graph.num_sequences])

    def run_eagerly(self, graph: ChunkGraph) -> None:
        """Do what the graph does, from the inputs as they are."""
        rows = self._inputs.open(graph.num_tokens, graph.num_sequences)
        attention = self._attention.start_chunks(rows.chunks, rows.cache_positions)
        sampled: Tensor = self._model(rows.tokens, rows.positions, attention, rows.logit_rows)
        reported = torch.empty(graph.num_sequences, dtype=torch.int32, device=sampled.device)
        self._draw(
            self._model.logits(sampled),
            rows.sampled_slots,
            rows.sampled_indices,
            reported,
            variant=graph.variant,
        )
        self._store.keep(self._inputs.ring(), reported)
        if self._hidden is None:
            # Wide enough for all sizes: only few rows are float32.
            self._hidden = sampled.new_empty(
                self._sequences[-1], sampled.shape[1], dtype=torch.float32
            )
        self._hidden[: graph.num_sequences].copy_(sampled)

    def _capture(self, graph: ChunkGraph) -> None:
        started = time.monotonic()
        nowhere = np.zeros(0, dtype=np.int64)
        self._inputs.fill(
            graph.num_tokens, graph.num_sequences, self._store.free_ring, no_rows(), nowhere
        )
        self._store.capture(graph, partial(self.run_eagerly, graph))
        log.info(
            "graph captured tokens=%d sequences=%d variant=%d seconds=%.2f",
            *(*graph, time.monotonic() - started),
        )

"""Decode steps as CUDA graphs: from the last tokens' ids to the next ones in one launch.

A graph is captured for each of a few row counts, its buckets; a step runs in the smallest that
holds its rows. What is inside:

    inputs ─► last tokens ─► model ─► logits ─► draw ─► last tokens, reported tokens
                               │
                               └─► hidden states, from which the few steps that need more than a
                                   draw (filters, log-probabilities) compute their logits again

Steps with chunks run eagerly.
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
from worker.decode_inputs import DecodeInputs
from worker.models.causal_lm import CausalLM
from worker.sampler import Samples
from worker.sampling_slots import SamplingSlots
from worker.step_rows import Int32Array, StepRows

FAILED = -1
"""Reported in place of the token of a row whose logits are not finite."""

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
    """Draws tokens without filters, in a way that can be captured."""

    def __call__(
        self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
    ) -> Samples:
        """logits [rows, vocab] in any float type, then [rows] float32, int64, int64."""
        ...


class Replay(NamedTuple):
    """What a replayed step left, valid until the next. `bucket` is the graph's row count."""

    reported: Tensor
    """[rows] int32 the sampled tokens, FAILED where a row failed."""
    hidden: Tensor
    """[bucket, hidden] before the last norm."""


class DecodeGraphs:
    """The graphs of one rank. They share their memory, so only one runs at a time."""

    def __init__(
        self,
        model: CausalLM,
        attention: GraphableBackend,
        inputs: DecodeInputs,
        sampling: SamplingSlots,
        last_tokens: Tensor,
        draw: Draw,
        *,
        buckets: Sequence[int],
    ) -> None:
        """`last_tokens` is [slots + 1], the pad slot last, as are the tensors of `sampling`."""
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._sampling = sampling
        self._last_tokens = last_tokens
        self._draw = draw
        self._buckets = tuple(buckets)
        self._reported = torch.zeros(buckets[-1], dtype=torch.int32, device=last_tokens.device)
        self._hidden: Tensor | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self) -> None:
        """Capture every bucket, largest first so that the others fit into its memory."""
        started = time.monotonic()
        pool = None
        with torch.inference_mode():
            for bucket in reversed(self._buckets):
                self._fill_with_padding(bucket)
                self.run_eagerly(bucket)  # libraries set themselves up; that cannot be captured
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self.run_eagerly(bucket)
                pool = graph.pool()
                self._graphs[bucket] = graph
        torch.cuda.synchronize()
        log.info(
            "graphs captured count=%d largest=%d seconds=%.1f",
            *(len(self._graphs), self._buckets[-1], time.monotonic() - started),
        )

    def bucket(self, rows: StepRows) -> int | None:
        """Return the bucket that a step runs in, or None if it has to run eagerly."""
        return choose_bucket(self._buckets, len(rows.decode_slots), len(rows.chunks))

    def replay(
        self, bucket: int, slots: Int32Array, positions: Int32Array, block_tables: Int32Array
    ) -> Replay:
        """Run a decode step. Its results are not waited for."""
        self._inputs.fill(bucket, slots, positions, block_tables)
        self._graphs[bucket].replay()
        assert self._hidden is not None, "graphs are captured before they are replayed"
        return Replay(self._reported[: len(slots)], self._hidden[:bucket])

    def run_eagerly(self, bucket: int) -> None:
        """Do what the bucket's graph does, from the inputs as they are."""
        columns = self._inputs.columns(bucket)
        slots, positions = columns.slots.long(), columns.positions.long()
        attention = self._attention.start_decode(
            DecodeRows(
                cache_positions=columns.cache_positions.long(),
                lengths=columns.lengths,
                block_tables=columns.block_tables,
            )
        )
        tokens = self._last_tokens.index_select(0, slots)
        hidden: Tensor = self._model(tokens, positions, attention)
        temperatures, seeds = self._sampling.draw_parameters(slots)
        samples = self._draw(
            self._model.logits(hidden), temperatures, seeds, columns.lengths.long()
        )
        self._last_tokens.index_copy_(0, slots, samples.tokens)
        reported = samples.tokens.masked_fill(samples.failed, FAILED)
        self._reported[:bucket].copy_(reported)
        if self._hidden is None:
            # The first run is the largest bucket's, before any capture.
            self._hidden = torch.empty_like(hidden)
        self._hidden[:bucket].copy_(hidden)

    def _fill_with_padding(self, bucket: int) -> None:
        empty = np.zeros(0, dtype=np.int32)
        self._inputs.fill(bucket, empty, empty, empty.reshape(0, 1))

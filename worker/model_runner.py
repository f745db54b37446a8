"""The back end that computes a model: a `StepRunner` over torch.

It follows the plans (`SlotTable`), keeps on the device what the host must not wait for (each
slot's last token and sampling parameters), and runs one forward pass a step:

    plan ─► SlotTable ─► BatchBuilder ─► model(tokens, positions, attention) ─► logits
                                                                                  │
    output ◄─ failures ◄─ (copies to the host) ◄─ last tokens of the slots ◄─ sample ◄─┘

On a GPU a launched step is only queued. Its results leave on a stream of their own, so that the
next step need not wait for them, and are looked at when that copy has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.columns import pack_int32
from protocol.errors import ErrorCode, ProcessError
from protocol.messages import EngineFacts, LogprobColumns, SamplingParams, StepPlan
from worker.attention.base import AttentionBackend, GraphableBackend
from worker.batch import BatchBuilder
from worker.cuda_graphs import DecodeGraphs, Draw, graph_buckets
from worker.decode_inputs import DecodeInputs, changed_blocks
from worker.failed_slots import FailedSlots
from worker.kv_cache import KVCache
from worker.models.causal_lm import CausalLM
from worker.runner import (
    FinishedStep,
    LaunchedStep,
    StepOutput,
    assemble_output,
    out_of_memory_output,
)
from worker.sampler import top_logprobs
from worker.sampling_slots import NO_LOGPROBS, SamplingSlots
from worker.slot_sampler import FAILED, SlotSampler
from worker.slots import SlotTable
from worker.step_rows import Int32Array, StepRows
from worker.upload import upload

_CPU_ALLOCATION_FAILED = "DefaultCPUAllocator: can't allocate memory"


class ModelRunner:
    """Runs plans on one rank's model, weights loaded and cache allocated."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        cache: KVCache,
        facts: EngineFacts,
        *,
        sampling: SamplingSlots,
        sampler: SlotSampler,
        tp: int,
        min_rows: int,
        device: torch.device,
    ) -> None:
        """`sampling` has a slot more than `facts`: rows that fill up a graph's bucket use it."""
        self._model = model
        self._attention = attention
        self._cache = cache
        self._facts = facts
        self._tp = tp
        self._device = device
        self._table = SlotTable(
            slots=facts.slots,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
        )
        self._builder = BatchBuilder(
            block_size=facts.block_size,
            pad_block=cache.pad_block,
            min_rows=min_rows,
            device=device,
        )
        self._sampling = sampling
        self._sampler = sampler
        self._failed = FailedSlots(self._table)
        self._inputs: DecodeInputs | None = None
        self._graphs: DecodeGraphs | None = None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def facts(self) -> EngineFacts:
        """What this rank has."""
        return self._facts

    def capture_decode_graphs(self, attention: GraphableBackend, draw: Draw) -> None:
        """Run decode-only steps as CUDA graphs from now on. `attention` is the runner's own."""
        self._inputs = DecodeInputs(
            self._sampling.last_tokens,
            max_rows=self._facts.slots,
            max_blocks=self._table.block_tables.shape[1],
            block_size=self._facts.block_size,
            pad_block=self._cache.pad_block,
        )
        self._graphs = DecodeGraphs(
            self._model,
            attention,
            self._inputs,
            draw,
            buckets=graph_buckets(self._facts.slots),
            device=self._device,
        )
        with torch.inference_mode():
            self._graphs.capture()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Apply a plan and start to compute its rows."""
        self._failed.take_effect(plan.step_id)
        rows = self._table.apply(plan)
        try:
            with torch.inference_mode():
                return self._launch(rows)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            if self._tp > 1:
                raise ProcessError(f"Step {rows.step_id} ran out of memory.") from error
            for slot in rows.slots:
                self._table.fail(slot, ErrorCode.OUT_OF_MEMORY)
            return FinishedStep(out_of_memory_output(rows))

    def _launch(self, rows: StepRows) -> LaunchedStep:
        if rows.joins:
            self._sampling.join(rows.joins, [self._params(slot) for slot in rows.joins])
        self._cache.copy_blocks(rows.copies.tolist())
        if self._inputs is not None:
            self._inputs.set_blocks(
                changed_blocks(
                    rows.joins,
                    rows.new_blocks,
                    self._table.block_tables,
                    self._table.num_blocks_held,
                )
            )
        if len(rows.failures) == rows.num_rows:
            return FinishedStep(assemble_output(rows, np.zeros(0, dtype=np.int32), {}))
        if self._graphs is not None:
            bucket = self._graphs.bucket(len(rows.decode_slots), len(rows.chunks))
            if bucket is not None:
                return self._replay(self._graphs, bucket, rows)

        batch = self._builder.build(rows, self._table.block_tables, self._sampling.last_tokens)
        attention = self._attention.start_step(batch)
        hidden: Tensor = self._model(batch.tokens, batch.positions, attention)
        if not len(batch.sampled):
            nothing = torch.empty(0, dtype=torch.int32, device=self._device)
            return self._leave(rows, nothing, None)
        logits = self._model.logits(hidden.index_select(0, batch.logit_rows))
        logits = logits[: len(batch.sampled)]
        reported = self._sampler.sample(logits, batch.sampled)
        return self._leave(rows, reported, self._logprobs(rows, logits, reported))

    def _replay(self, graphs: DecodeGraphs, bucket: int, rows: StepRows) -> LaunchedStep:
        """Run a step of decode rows as a graph."""
        slots = rows.decode_slots
        replay = graphs.replay(
            bucket,
            slots,
            rows.decode_positions,
            has_filters=self._sampling.any_filtered(slots),
        )
        logprobs = None
        if (self._sampling.num_logprobs[slots] != NO_LOGPROBS).any():
            # Of all the bucket's rows: then it is the product that the graph has done.
            logits = self._model.logits(replay.hidden)
            logprobs = self._logprobs(rows, logits[: len(slots)], replay.reported)
        return self._leave(rows, replay.reported, logprobs)

    def _params(self, slot: int) -> SamplingParams:
        params = self._table.params[slot]
        assert params is not None, f"slot {slot} joined without parameters"
        return params

    def _logprobs(self, rows: StepRows, logits: Tensor, reported: Tensor) -> "_Logprobs | None":
        """Return the log-probabilities of the sampled rows that want them, on the device."""
        num_top = self._sampling.num_logprobs[rows.sampled_slots]
        wanting = np.flatnonzero(num_top != NO_LOGPROBS)
        if not len(wanting):
            return None
        (index,) = upload((wanting,), self._device)
        whole = self._sampler.whole_logits(logits.index_select(0, index)).float()
        if self._facts.rank > 0:
            return None
        tokens = reported.index_select(0, index).clamp(min=0).long()
        ids, values = top_logprobs(whole, tokens, int(num_top[wanting].max()))
        return _Logprobs(
            rows=rows.sampled_rows[wanting],
            positions=rows.sampled_indices[wanting],
            counts=1 + num_top[wanting],
            ids=ids.to(torch.int32),
            values=values,
        )

    def _leave(
        self, rows: StepRows, reported: Tensor, logprobs: "_Logprobs | None"
    ) -> LaunchedStep:
        """Send a step's results to the host. `reported` is [sampled]"""
        generations = self._table.generations[rows.slots]
        if self._copies is None:
            return _Step(rows, generations, self._failed, reported, logprobs, None)
        computed, done = torch.cuda.Event(), torch.cuda.Event()
        computed.record()
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(computed)
            # What is copied must live until then: the step holds on to it.
            host = _to_host(reported)
            host_logprobs = None if logprobs is None else logprobs.to_host()
            done.record()
        sources = (reported,) if logprobs is None else (reported, logprobs.ids, logprobs.values)
        return _Step(rows, generations, self._failed, host, host_logprobs, done, sources)


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities of some rows, each its own token's first; a row may want fewer."""

    rows: Int32Array
    """[n]"""
    positions: Int32Array
    """[n]"""
    counts: Int32Array
    """[n] how many each row wants."""
    ids: Tensor
    """[n, most] int32"""
    values: Tensor
    """[n, most] float32"""

    def to_host(self) -> "_Logprobs":
        """Return the same on the host, once the current stream has come so far."""
        return _Logprobs(
            self.rows, self.positions, self.counts, _to_host(self.ids), _to_host(self.values)
        )

    def columns(self, failed: Sequence[int]) -> LogprobColumns | None:
        """Return the columns of all but the failed rows, None if that is none."""
        kept = ~np.isin(self.rows, list(failed))
        if not kept.any():
            return None
        counts = self.counts[kept]
        # Rows that want fewer than the widest take the first of theirs.
        is_wanted = np.arange(self.ids.shape[1]) < counts[:, None]
        return LogprobColumns(
            rows=self.rows[kept].tobytes(),
            positions=self.positions[kept].tobytes(),
            n=pack_int32(counts.tolist()),
            ids=self.ids.numpy()[kept][is_wanted].tobytes(),
            values=self.values.numpy()[kept][is_wanted].tobytes(),
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """`LaunchedStep` of a model."""

    rows: StepRows
    generations: NDArray[np.int64]
    """Of `rows.slots` when the step was launched."""
    failed_slots: FailedSlots
    reported: Tensor
    """[sampled] int32 on the host, FAILED where a row has no token; filled by then."""
    logprobs: _Logprobs | None
    done: torch.cuda.Event | None
    """After it everything is on the host; None: it is already."""
    sources: tuple[Tensor, ...] = ()
    """What is being copied."""

    def is_done(self) -> bool:
        """Return whether everything is on the host."""
        return self.done is None or self.done.query()

    def output(self) -> StepOutput:
        """Wait for the results and put them into plan row order."""
        if self.done is not None:
            self.done.synchronize()
        tokens: Int32Array = self.reported.numpy()
        rows, generations = self.rows, self.generations.tolist()
        failed = self.failed_slots.of_rows(rows, generations)
        for index in np.flatnonzero(tokens == FAILED).tolist():
            row, slot = int(rows.sampled_rows[index]), int(rows.sampled_slots[index])
            if row not in failed:
                generation = generations[rows.slots.index(slot)]
                self.failed_slots.add(rows.step_id, slot, generation, ErrorCode.NUMERIC)
                failed[row] = ErrorCode.NUMERIC
        logprobs = None if self.logprobs is None else self.logprobs.columns(list(failed))
        return assemble_output(rows, tokens, failed, logprobs)


def _to_host(tensor: Tensor) -> Tensor:
    """Start to copy a tensor to pinned memory, in the current stream."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    # torch has a type for the device's memory, but says it for the host's only in words.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        _CPU_ALLOCATION_FAILED in str(error)
    )

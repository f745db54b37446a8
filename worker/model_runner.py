"""The back end that computes a model: a `StepRunner` over torch.

It follows the plans (`SlotTable`), keeps on the device what the host must not wait for (each
slot's last token and sampling parameters), and runs one forward pass a step:

    plan ─► SlotTable ─► BatchBuilder ─► model(tokens, positions, attention) ─► logits
                                                                                  │
    output ◄─ failures ◄─ (copies to the host) ◄─ last tokens of the slots ◄─ sample ◄─┘

On a GPU a launched step is only queued. Its results leave on a stream of their own, so that the
next step need not wait for them, and are looked at when that copy has ended.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.errors import ErrorCode, ProcessError
from protocol.messages import EngineFacts, StepPlan
from worker.attention.base import AttentionBackend, GraphableBackend
from worker.batch import BatchBuilder
from worker.chunk_graphs import ChunkGraphs
from worker.chunk_inputs import ChunkInputs
from worker.decode_graphs import DecodeGraphs, Draw, Replay
from worker.decode_inputs import DecodeInputs
from worker.failed_slots import FailedSlots
from worker.graph_sizes import CHUNK_TOKENS, decode_buckets
from worker.graph_store import GraphStore
from worker.host_blocks import HostBlocks
from worker.kv_cache import KVCache
from worker.logit_edits import Known
from worker.logprobs import Logprobs
from worker.models.causal_lm import CausalLM
from worker.prompt_logprobs import ScoredRows, find_scored, score
from worker.result_copies import HostResults, ResultCopies
from worker.runner import (
    FinishedStep,
    LaunchedStep,
    StepOutput,
    assemble_output,
    out_of_memory_output,
)
from worker.sampler import top_logprobs
from worker.sampling_slots import NO_LOGPROBS, SamplingSlots, Variant
from worker.slot_sampler import FAILED, SlotSampler
from worker.slot_tables import SlotTables, changed_blocks
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
        host_blocks: HostBlocks | None = None,
    ) -> None:
        """`sampling` has a slot more than `facts`: rows that fill up a graph's bucket use it."""
        self._model = model
        self._attention = attention
        self._cache = cache
        self._host_blocks = host_blocks
        self._facts = facts
        self._tp = tp
        self._device = device
        self._table = SlotTable(
            slots=facts.slots,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            host_blocks=facts.host_blocks,
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
        self._graphs: _Graphs | None = None
        self._copies = (
            ResultCopies(max_rows=facts.slots, device=device) if device.type == "cuda" else None
        )

    @property
    def facts(self) -> EngineFacts:
        """What this rank has."""
        return self._facts

    def capture_graphs(self, attention: GraphableBackend, draw: Draw) -> None:
        """Run decode steps and short steps with chunks as CUDA graphs from now on.

        `attention` is the runner's own.
        """
        slots = self._facts.slots
        tables = SlotTables(
            self._sampling.last_tokens,
            max_blocks=self._table.block_tables.shape[1],
            block_size=self._facts.block_size,
            pad_block=self._cache.pad_block,
        )
        store = GraphStore(max_rows=slots, device=self._device)
        decode = DecodeGraphs(
            self._model,
            attention,
            DecodeInputs(tables, max_rows=slots),
            draw,
            store,
            buckets=decode_buckets(slots),
        )
        chunks = ChunkGraphs(
            self._model,
            attention,
            ChunkInputs(tables, max_tokens=CHUNK_TOKENS[-1], max_sequences=slots),
            draw,
            store,
            max_sequences=slots,
        )
        with torch.inference_mode():
            decode.capture()
        self._graphs = _Graphs(tables, decode, chunks)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Apply a plan and start to compute its rows."""
        self._failed.take_effect(plan.step_id)
        rows = self._table.apply(plan)
        if self._host_blocks is not None:
            # First, as it needs no memory: whoever is not in this step must not lose its blocks.
            self._host_blocks.move_out(rows.swap_outs.tolist())
        try:
            with torch.inference_mode():
                return self._launch(rows)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            if self._tp > 1:
                raise ProcessError(f"Step {rows.step_id} ran out of memory.") from error
            # A slot without a row may have been given a block that the device's table lacks now.
            for slot in {*rows.slots, *rows.new_blocks[:, 0].tolist()}:
                self._table.fail(slot, ErrorCode.OUT_OF_MEMORY)
            return FinishedStep(out_of_memory_output(rows))

    def _launch(self, rows: StepRows) -> LaunchedStep:
        if rows.joins:
            joins = [self._known(slot) for slot in rows.joins]
            self._sampling.join(rows.joins, [known.params for known in joins])
            self._sampling.edits.join(joins)
        self._cache.copy_blocks(rows.copies.tolist())
        if self._host_blocks is not None:
            self._host_blocks.move_in(rows.swap_ins.tolist())
        if self._graphs is not None:
            changed = changed_blocks(
                rows.joins,
                rows.new_blocks,
                self._table.block_tables,
                self._table.num_blocks_held,
            )
            self._graphs.tables.set_blocks(changed)
        if len(rows.failures) == rows.num_rows:
            return FinishedStep(assemble_output(rows, np.zeros(0, dtype=np.int32), {}))
        replay = None if self._graphs is None else self._replay(self._graphs, rows)
        return self._compute(rows) if replay is None else self._take(rows, replay)

    def _compute(self, rows: StepRows) -> LaunchedStep:
        """Run a step eagerly."""
        scored = self._scored(rows)
        batch = self._builder.build(
            rows,
            self._table.block_tables,
            self._sampling.last_tokens,
            None if scored is None else scored.hidden_rows,
        )
        attention = self._attention.start_step(batch)
        hidden: Tensor = self._model(batch.tokens, batch.positions, attention, batch.wanted_rows)
        scores = None
        if scored is not None:
            hidden, of_prompts = hidden.tensor_split([len(hidden) - batch.num_scored])
            scores = self._score(scored, of_prompts)
        if not len(batch.sampled):
            nothing = torch.empty(0, dtype=torch.int32, device=self._device)
            return self._leave(rows, nothing, scores=scores)
        logits = self._model.logits(hidden)[: len(batch.sampled)]
        reported = self._sampler.sample(logits, batch.sampled)
        return self._leave(rows, reported, self._logprobs(rows, logits, reported), scores=scores)

    def _scored(self, rows: StepRows) -> ScoredRows | None:
        """Return the prompt tokens that a step scores, if there are any."""
        return find_scored(
            rows,
            self._sampling.num_prompt_logprobs,
            self._table.token_ids,
            self._table.prompt_lens,
        )

    def _score(self, scored: ScoredRows, hidden: Tensor) -> Logprobs | None:
        """Return the log-probabilities of prompt tokens, given the hidden states before them."""
        (tokens,) = upload((scored.tokens.astype(np.int64),), self._device)
        num_top = int(scored.counts.max()) - 1
        scores = score(self._model, self._sampler, hidden, tokens, num_top)
        if self._facts.rank > 0:
            return None
        return Logprobs(
            rows=scored.rows,
            positions=scored.positions,
            counts=scored.counts,
            on_device=tuple(scores),
        )

    def _replay(self, graphs: "_Graphs", rows: StepRows) -> Replay | None:
        """Run a step as a graph, if there is one for it."""
        if rows.chunks and self._scored(rows) is not None:
            return None
        variant = self._sampling.variant(rows.sampled_slots)
        if variant is Variant.EDITED:
            # Some requests' edits end with min_tokens.
            variant = self._sampling.variant(rows.sampled_slots, rows.sampled_indices)
        if rows.chunks:
            graph = graphs.chunks.choose(rows, variant)
            if graph is None:
                return None
            cache_positions = self._builder.cache_positions(rows, self._table.block_tables)
            return graphs.chunks.replay(graph, rows, cache_positions)
        bucket = graphs.decode.bucket(len(rows.decode_slots))
        if bucket is None:
            return None
        return graphs.decode.replay(bucket, rows.decode_slots, rows.decode_positions, variant)

    def _take(self, rows: StepRows, replay: Replay) -> LaunchedStep:
        """Take what a graph has left: a result for every sequence, whether it samples or not."""
        wants_logprobs = self._sampling.num_logprobs[rows.sampled_slots] != NO_LOGPROBS
        is_sampled = [True] * len(rows.decode_slots) + [chunk.is_last for chunk in rows.chunks]
        sampled = None if all(is_sampled) else np.flatnonzero(is_sampled)
        logprobs = None
        if wants_logprobs.any():
            # Of all the graph's rows: then it is the product that the graph has done.
            logits = self._model.logits(replay.hidden)[: len(is_sampled)]
            reported = replay.reported
            if sampled is not None:
                (index,) = upload((sampled,), self._device)
                logits, reported = logits.index_select(0, index), reported.index_select(0, index)
            logprobs = self._logprobs(rows, logits, reported)
        return self._leave(rows, replay.reported, logprobs, sampled)

    def _known(self, slot: int) -> Known:
        params = self._table.params[slot]
        assert params is not None, f"slot {slot} joined without parameters"
        return Known(
            slot=slot,
            params=params,
            token_ids=self._table.token_ids[slot],
            prompt_len=int(self._table.prompt_lens[slot]),
        )

    def _logprobs(self, rows: StepRows, logits: Tensor, reported: Tensor) -> Logprobs | None:
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
        return Logprobs(
            rows=rows.sampled_rows[wanting],
            positions=rows.sampled_indices[wanting],
            counts=1 + num_top[wanting],
            on_device=(ids.to(torch.int32), values),
        )

    def _leave(
        self,
        rows: StepRows,
        reported: Tensor,
        logprobs: Logprobs | None = None,
        sampled: NDArray[np.int64] | None = None,
        scores: Logprobs | None = None,
    ) -> LaunchedStep:
        """Send a step's results to the host. `sampled`: which of `reported` are; None: all."""
        on_device = () if logprobs is None else logprobs.on_device
        on_device += () if scores is None else scores.on_device
        if self._copies is None:
            results = HostResults(reported, on_device)
        else:
            results = self._copies.start(reported, on_device)
        generations = self._table.generations[rows.slots if rows.chunks else rows.decode_slots]
        return _Step(rows, generations, self._failed, results, sampled, logprobs, scores)


class _Graphs(NamedTuple):
    """What is needed to run steps as graphs."""

    tables: SlotTables
    decode: DecodeGraphs
    chunks: ChunkGraphs


@dataclass(frozen=True, slots=True)
class _Step:
    """`LaunchedStep` of a model."""

    rows: StepRows
    generations: NDArray[np.int64]
    """Of `rows.slots` when the step was launched."""
    failed_slots: FailedSlots
    results: HostResults
    """Tokens of the sampled rows, or more, FAILED where a row has none; then the tensors of
    `logprobs` and of `scores`."""
    sampled: NDArray[np.int64] | None
    """Which tokens are the sampled rows'; None: all."""
    logprobs: Logprobs | None
    scores: Logprobs | None
    """Of prompts."""

    def is_done(self) -> bool:
        """Return whether the results are on the host."""
        return self.results.are_there()

    def output(self) -> StepOutput:
        """Wait for the results and put them into plan row order."""
        self.results.wait()
        reported: Int32Array = self.results.reported.numpy()
        tokens = reported.copy() if self.sampled is None else reported[self.sampled]
        rows, generations = self.rows, self.generations.tolist()
        failed = self.failed_slots.of_rows(rows, generations)
        for index in np.flatnonzero(tokens == FAILED).tolist():
            row, slot = int(rows.sampled_rows[index]), int(rows.sampled_slots[index])
            if row not in failed:
                generation = generations[rows.slots.index(slot)]
                self.failed_slots.add(rows.step_id, slot, generation, ErrorCode.NUMERIC)
                failed[row] = ErrorCode.NUMERIC
        copies, logprobs, scores = self.results.others, None, None
        if self.logprobs is not None:
            logprobs = self.logprobs.columns(copies[:2], list(failed))
        if self.scores is not None:
            scores = self.scores.columns(copies[-3:], list(failed))
        return assemble_output(rows, tokens, failed, logprobs, scores)


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    # torch has a type for the device's memory, but says it for the host's only in words.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        _CPU_ALLOCATION_FAILED in str(error)
    )

"""The back end that computes a model: a `StepRunner` over torch.

It follows the plans (`SlotTable`), keeps on the device what the host must not wait for (each
slot's last token and sampling parameters), and runs one forward pass a step:

    plan ─► SlotTable ─► BatchBuilder ─► model(tokens, positions, attention) ─► logits
                                                                                  │
    output ◄─ failures, log-probabilities ◄─ last tokens of the slots ◄─ sample ◄─┘
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.columns import pack_int32
from protocol.errors import ErrorCode, ProcessError
from protocol.messages import EngineFacts, LogprobColumns, StepPlan
from worker.attention.base import AttentionBackend, GraphableBackend
from worker.batch import BatchBuilder
from worker.cuda_graphs import FAILED, DecodeGraphs, Draw, graph_buckets
from worker.decode_inputs import DecodeInputs
from worker.kv_cache import KVCache
from worker.models.causal_lm import CausalLM
from worker.parallel import TensorParallel
from worker.runner import StepOutput, assemble_output, out_of_memory_output
from worker.sampler import RowSampler, top_logprobs
from worker.sampling_slots import NO_LOGPROBS, SamplingSlots
from worker.sharded_sampler import ShardedSampler
from worker.slots import SlotTable
from worker.step_rows import Int32Array, StepRows

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
        group: TensorParallel,
        min_rows: int,
        device: torch.device,
        sampler: RowSampler | None = None,
    ) -> None:
        """`sampler`: how this device samples; None: by torch."""
        self._model = model
        self._attention = attention
        self._cache = cache
        self._facts = facts
        self._tp = group.size
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
        # One more than there are: rows that only fill up a graph's bucket use the last.
        self._sampling = SamplingSlots(facts.slots + 1, facts.vocab_size, device)
        self._last_tokens = torch.zeros(facts.slots + 1, dtype=torch.int64, device=device)
        self._sampler = sampler or ShardedSampler(facts.vocab_size, group)
        self._graphs: DecodeGraphs | None = None

    @property
    def facts(self) -> EngineFacts:
        """What this rank has."""
        return self._facts

    def capture_decode_graphs(self, attention: GraphableBackend, draw: Draw) -> None:
        """Run decode-only steps as CUDA graphs from now on. `attention` is the runner's own."""
        slots, block_size = self._facts.slots, self._facts.block_size
        inputs = DecodeInputs(
            max_rows=slots,
            max_blocks=self._table.block_tables.shape[1],
            block_size=block_size,
            pad_slot=slots,
            pad_block=self._cache.pad_block,
            device=self._last_tokens.device,
        )
        self._graphs = DecodeGraphs(
            self._model,
            attention,
            inputs,
            self._sampling,
            self._last_tokens,
            draw,
            buckets=graph_buckets(slots),
        )
        self._graphs.capture()

    def execute(self, plan: StepPlan) -> StepOutput:
        """Apply a plan, compute its rows and return what they produced."""
        rows = self._table.apply(plan)
        try:
            with torch.inference_mode():
                return self._compute(rows)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            if self._tp > 1:
                raise ProcessError(f"Step {rows.step_id} ran out of memory.") from error
            for slot in rows.slots:
                self._table.fail(slot, ErrorCode.OUT_OF_MEMORY)
            return out_of_memory_output(rows)

    def _compute(self, rows: StepRows) -> StepOutput:
        for slot in rows.joins:
            params = self._table.params[slot]
            assert params is not None, f"slot {slot} joined without parameters"
            self._sampling.join(slot, params)
        self._cache.copy_blocks(rows.copies.tolist())
        if len(rows.failures) == rows.num_rows:
            return assemble_output(rows, np.zeros(0, dtype=np.int32), {})

        bucket = None if self._graphs is None else self._graphs.bucket(rows)
        if self._graphs is not None and bucket is not None:
            return self._replay(self._graphs, bucket, rows)

        batch = self._builder.build(rows, self._table.block_tables, self._last_tokens)
        attention = self._attention.start_step(batch)
        hidden: Tensor = self._model(batch.tokens, batch.positions, attention)
        if not batch.num_sampled:
            return assemble_output(rows, np.zeros(0, dtype=np.int32), {})
        logits = self._model.logits(hidden.index_select(0, batch.logit_rows))
        return self._sample(rows, logits[: batch.num_sampled].float())

    def _replay(self, graphs: DecodeGraphs, bucket: int, rows: StepRows) -> StepOutput:
        """Run a step of decode rows as a graph."""
        replay = graphs.replay(
            bucket, rows.decode_slots, rows.decode_positions, self._table.block_tables
        )
        if self._sampling.need_logits(rows.decode_slots):
            # Of all the bucket's rows: then it is the product that the graph has done.
            logits = self._model.logits(replay.hidden)
            return self._sample(rows, logits[: len(rows.decode_slots)].float())
        tokens = replay.reported.cpu().numpy()
        failed = self._fail(rows, tokens == FAILED)
        return assemble_output(rows, tokens, failed)

    def _sample(self, rows: StepRows, logits: Tensor) -> StepOutput:
        """Sample the step's tokens and keep them as last tokens.

        `logits` are this rank's, [sampled, width]; the tokens are the same on every rank.
        """
        slots, positions = rows.sampled_slots, rows.sampled_indices
        samples = self._sampler.sample(logits, self._sampling.rows(slots, positions))
        index = torch.from_numpy(slots.astype(np.int64)).to(logits.device)
        self._last_tokens.index_copy_(0, index, samples.tokens)

        tokens = samples.tokens.to(torch.int32).cpu().numpy()
        failed = self._fail(rows, samples.failed.cpu().numpy())
        logprobs = self._logprobs(rows, logits, samples.tokens, slots, positions, failed)
        return assemble_output(rows, tokens, failed, logprobs)

    def _fail(self, rows: StepRows, has_failed: NDArray[np.bool_]) -> dict[int, ErrorCode]:
        """Mark the slots of sampled rows that failed, [sampled]; return each one's row and code."""
        failed: dict[int, ErrorCode] = {}
        for i in np.flatnonzero(has_failed).tolist():
            failed[int(rows.sampled_rows[i])] = ErrorCode.NUMERIC
            self._table.fail(int(rows.sampled_slots[i]), ErrorCode.NUMERIC)
        return failed

    def _logprobs(
        self,
        rows: StepRows,
        logits: Tensor,
        tokens: Tensor,
        slots: Int32Array,
        positions: Int32Array,
        failed: Mapping[int, ErrorCode],
    ) -> LogprobColumns | None:
        """Return the log-probabilities of the rows that want them."""
        num_top = self._sampling.num_logprobs[slots]
        sampled_rows = rows.sampled_rows
        wanting = [
            i
            for i in np.flatnonzero(num_top != NO_LOGPROBS).tolist()
            if int(sampled_rows[i]) not in failed
        ]
        if not wanting:
            return None
        index = torch.tensor(wanting, device=logits.device)
        whole = self._sampler.whole_logits(logits[index])
        if self._facts.rank > 0:
            return None
        ids, values = top_logprobs(whole, tokens[index], int(num_top[wanting].max()))
        counts: Sequence[int] = (1 + num_top[wanting]).tolist()
        # Rows that want fewer than the widest take the first of theirs.
        is_wanted = np.arange(ids.shape[1]) < np.array(counts)[:, None]
        return LogprobColumns(
            rows=sampled_rows[wanting].tobytes(),
            positions=positions[wanting].tobytes(),
            n=pack_int32(counts),
            ids=ids.cpu().numpy().astype(np.int32)[is_wanted].tobytes(),
            values=values.cpu().numpy().astype(np.float32)[is_wanted].tobytes(),
        )


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    # torch has a type for the device's memory, but says it for the host's only in words.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        _CPU_ALLOCATION_FAILED in str(error)
    )

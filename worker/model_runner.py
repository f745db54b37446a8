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
from torch import Tensor

from protocol.columns import pack_int32
from protocol.errors import ErrorCode, ProcessError
from protocol.messages import EngineFacts, LogprobColumns, StepPlan
from worker.attention.base import AttentionBackend
from worker.batch import BatchBuilder
from worker.kv_cache import KVCache
from worker.models.causal_lm import CausalLM
from worker.parallel import TensorParallel
from worker.runner import StepOutput, assemble_output, out_of_memory_output
from worker.sampler import top_logprobs
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
    ) -> None:
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
        self._sampling = SamplingSlots(facts.slots, facts.vocab_size, device)
        self._sampler = ShardedSampler(facts.vocab_size, group)
        self._last_tokens = torch.zeros(facts.slots, dtype=torch.int64, device=device)

    @property
    def facts(self) -> EngineFacts:
        """What this rank has."""
        return self._facts

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

        batch = self._builder.build(rows, self._table.block_tables, self._last_tokens)
        attention = self._attention.start_step(batch)
        hidden: Tensor = self._model(batch.tokens, batch.positions, attention)
        if not batch.num_sampled:
            return assemble_output(rows, np.zeros(0, dtype=np.int32), {})
        logits = self._model.logits(hidden.index_select(0, batch.logit_rows))
        return self._sample(rows, logits[: batch.num_sampled].float())

    def _sample(self, rows: StepRows, logits: Tensor) -> StepOutput:
        """Sample the step's tokens and keep them as last tokens.

        `logits` are this rank's, [sampled, width]; the tokens are the same on every rank.
        """
        slots, positions = rows.sampled_slots, rows.sampled_indices
        samples = self._sampler.sample(logits, self._sampling.rows(slots, positions))
        index = torch.from_numpy(slots.astype(np.int64)).to(logits.device)
        self._last_tokens.index_copy_(0, index, samples.tokens)

        tokens = samples.tokens.to(torch.int32).cpu().numpy()
        sampled_rows = rows.sampled_rows
        failed: dict[int, ErrorCode] = {}
        for i in np.flatnonzero(samples.failed.cpu().numpy()).tolist():
            failed[int(sampled_rows[i])] = ErrorCode.NUMERIC
            self._table.fail(int(slots[i]), ErrorCode.NUMERIC)
        logprobs = self._logprobs(rows, logits, samples.tokens, slots, positions, failed)
        return assemble_output(rows, tokens, failed, logprobs)

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

"""The back end behind `--fake-workers`: no model, no torch, and every token checkable.

It keeps a paged cache of words (`worker.checksum`) where a model keeps keys and values, writes a
word for each token it is fed, and reads a sequence's context back through its block table, block
by block, exactly as attention does. It trusts nothing else: whatever scheduler, protocol or slots
get wrong about tokens, positions or blocks comes out as a wrong token.

Ranks share nothing here, so each computes every token in full, and all must agree.
"""

from dataclasses import dataclass, field

import numpy as np

from protocol.columns import pack_float32, pack_int32
from protocol.errors import ErrorCode, ProcessError
from protocol.messages import EngineFacts, LogprobColumns, StepPlan
from worker.checksum import (
    NUM_LAYERS,
    UInt64Array,
    cache_words,
    checksum_logprobs,
    fold_words,
    next_tokens,
    position_weights,
    sampling_key,
)
from worker.faults import FaultInjector, Faults
from worker.runner import FinishedStep, StepOutput, assemble_output, out_of_memory_output
from worker.slots import SlotTable
from worker.step_rows import Chunk, Int32Array, StepRows

BACK_END = "checksum"
NO_LOGPROBS = -1


class ChecksumRunner:
    """A `StepRunner` of exact integer arithmetic.

    `facts` is what it claims to be; its cache holds `facts.num_blocks` blocks of 16 bytes a
    position. `tp` above 1 only changes what running out of memory means.
    """

    def __init__(
        self,
        facts: EngineFacts,
        *,
        tp: int = 1,
        faults: Faults | None = None,
        fault_seed: int = 0,
    ) -> None:
        self._facts = facts
        self._tp = tp
        self._numeric_token = faults.numeric_token if faults else None
        self._injector = FaultInjector(faults, fault_seed) if faults else None
        self._table = SlotTable(
            slots=facts.slots,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            host_blocks=facts.host_blocks,
        )
        self._cache: UInt64Array = np.zeros(
            (facts.num_blocks, facts.block_size, NUM_LAYERS), dtype=np.uint64
        )
        self._host: UInt64Array = np.zeros(
            (facts.host_blocks, facts.block_size, NUM_LAYERS), dtype=np.uint64
        )
        self._weights = position_weights(facts.max_model_len)
        self._last_tokens: Int32Array = np.zeros(facts.slots, dtype=np.int32)
        self._keys: UInt64Array = np.zeros(facts.slots, dtype=np.uint64)
        self._num_top: Int32Array = np.full(facts.slots, NO_LOGPROBS, dtype=np.int32)
        self._num_scored: Int32Array = np.full(facts.slots, NO_LOGPROBS, dtype=np.int32)

    @property
    def facts(self) -> EngineFacts:
        """What this rank claims to have."""
        return self._facts

    def launch(self, plan: StepPlan) -> FinishedStep:
        """Apply a plan and compute its rows."""
        return FinishedStep(self._execute(self._table.apply(plan)))

    def _execute(self, rows: StepRows) -> StepOutput:
        # First, as it needs no memory: whoever has left this step's rows must not lose its blocks.
        self._host[rows.swap_outs[:, 1]] = self._cache[rows.swap_outs[:, 0]]
        try:
            if self._injector:
                self._injector.before_step(rows.step_id)
            return self._compute(rows)
        except MemoryError as error:
            if self._tp > 1:
                raise ProcessError(f"Step {rows.step_id} ran out of memory.") from error
            for slot in rows.slots:
                self._table.fail(slot, ErrorCode.OUT_OF_MEMORY)
            return out_of_memory_output(rows)

    def _compute(self, rows: StepRows) -> StepOutput:
        for slot in rows.joins:
            params = self._table.params[slot]
            assert params is not None, f"slot {slot} joined without parameters"
            self._keys[slot] = sampling_key(params)
            self._num_top[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
            scores = params.prompt_logprobs
            self._num_scored[slot] = NO_LOGPROBS if scores is None else scores
        for source, target in rows.copies.tolist():
            self._cache[target] = self._cache[source]
        self._cache[rows.swap_ins[:, 1]] = self._host[rows.swap_ins[:, 0]]

        slots, positions = rows.decode_slots, rows.decode_positions
        blocks, offsets = np.divmod(positions, self._facts.block_size)
        self._cache[self._table.block_tables[slots, blocks], offsets] = cache_words(
            self._last_tokens[slots], positions
        )
        for chunk in rows.chunks:
            self._write_chunk(chunk)
        return self._sample(rows)

    def _write_chunk(self, chunk: Chunk) -> None:
        positions = np.arange(chunk.start, chunk.end, dtype=np.int32)
        blocks, offsets = np.divmod(positions, self._facts.block_size)
        self._cache[self._table.block_tables[chunk.slot, blocks], offsets] = cache_words(
            chunk.token_ids, positions
        )

    def _sample(self, rows: StepRows) -> StepOutput:
        slots, num_tokens = rows.sampled_slots, rows.sampled_indices
        contexts = zip(slots.tolist(), num_tokens.tolist(), strict=True)
        folds = np.array([self._fold(*context) for context in contexts], dtype=np.uint64)
        tokens = next_tokens(folds, num_tokens, self._keys[slots], self._facts.vocab_size)
        self._last_tokens[slots] = tokens

        failed = self._numeric_failures(rows)
        logprobs = self._logprobs(rows, tokens, failed)
        return assemble_output(rows, tokens, failed, logprobs, self._scores(rows, failed))

    def _fold(self, slot: int, num_tokens: int) -> np.uint64:
        """Return the fold of a slot's first `num_tokens` positions, as its block table has them."""
        num_blocks = -(-num_tokens // self._facts.block_size)
        blocks = self._table.block_tables[slot, :num_blocks]
        words = self._cache.take(blocks, axis=0).reshape(-1, NUM_LAYERS)
        return fold_words(words[:num_tokens], self._weights[:num_tokens])

    def _numeric_failures(self, rows: StepRows) -> dict[int, ErrorCode]:
        """Return the rows that fail as if their logits were NaN, and fail their slots."""
        failed: dict[int, ErrorCode] = {}
        if self._numeric_token is None:
            return failed
        for chunk in rows.chunks:
            known = self._table.token_ids[chunk.slot]
            if chunk.is_last and np.any(known == self._numeric_token):
                failed[chunk.row] = ErrorCode.NUMERIC
                self._table.fail(chunk.slot, ErrorCode.NUMERIC)
        return failed

    def _logprobs(
        self, rows: StepRows, tokens: Int32Array, failed: dict[int, ErrorCode]
    ) -> LogprobColumns | None:
        """Return made-up log-probabilities of the sampled tokens, for the rows that want them."""
        if self._facts.rank > 0:
            return None
        columns = _LogprobLists()
        sampled_rows, indices = rows.sampled_rows, rows.sampled_indices
        num_top = self._num_top[rows.sampled_slots]
        for index in np.flatnonzero(num_top != NO_LOGPROBS).tolist():
            row = int(sampled_rows[index])
            if row in failed:
                continue
            ids, values = checksum_logprobs(
                int(tokens[index]), int(num_top[index]), self._facts.vocab_size
            )
            columns.add(row, int(indices[index]), ids, values)
        return columns.pack()

    def _scores(self, rows: StepRows, failed: dict[int, ErrorCode]) -> LogprobColumns | None:
        """Return made-up log-probabilities of prompt tokens, for the chunks that want them."""
        columns = _LogprobLists()
        for chunk in rows.chunks:
            slot, num_top = chunk.slot, int(self._num_scored[chunk.slot])
            if num_top == NO_LOGPROBS or chunk.row in failed or self._facts.rank > 0:
                continue
            end = min(chunk.end + 1, int(self._table.prompt_lens[slot]))
            for position in range(chunk.start + 1, end):
                token = int(self._table.token_ids[slot][position])
                ids, values = checksum_logprobs(token, num_top, self._facts.vocab_size)
                columns.add(chunk.row, position, ids, values, rank=1)
        return columns.pack()


@dataclass(slots=True)
class _LogprobLists:
    """`LogprobColumns` being filled."""

    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    n: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def add(
        self, row: int, position: int, ids: list[int], values: list[float], *, rank: int = 0
    ) -> None:
        """Add an entry; of all or of none the rank is given."""
        self.rows.append(row)
        self.positions.append(position)
        self.n.append(len(ids))
        self.ids += ids
        self.values += values
        if rank:
            self.ranks.append(rank)

    def pack(self) -> LogprobColumns | None:
        """Return the columns, or None if there is no entry."""
        if not self.rows:
            return None
        return LogprobColumns(
            rows=pack_int32(self.rows),
            positions=pack_int32(self.positions),
            n=pack_int32(self.n),
            ids=pack_int32(self.ids),
            values=pack_float32(self.values),
            ranks=pack_int32(self.ranks),
        )

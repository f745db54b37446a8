"""Takes results: appends tokens, registers full blocks, sees which sequences are complete.

The committer looks at what came back, never at what is planned beyond it. It changes tokens and
the prefix index; ending a sequence is left to its caller, which is told.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ErrorCode
from protocol.messages import LogprobColumns, StepResult
from scheduler.deltas import (
    Addressed,
    Ending,
    Reason,
    ending_deltas,
    pick_logprobs,
    score_deltas,
    select_logprobs,
    step_deltas,
)
from scheduler.planned_step import Failure, PlannedStep
from scheduler.running import Running
from scheduler.sequence import Sequence
from scheduler.slot_table import RECENT_TOKENS, Rows
from scheduler.stats import Counters


@dataclass(frozen=True, slots=True)
class Committed:
    """What a result has brought."""

    deltas: list[Addressed]
    ended: list[Sequence]
    """Sequences whose terminal reason is among the deltas."""


class Committer:
    """Applies the results of steps, in step order."""

    def __init__(self, running: Running, counters: Counters) -> None:
        self._running = running
        self._table = running.table
        self._counters = counters

    def commit(self, step: PlannedStep, result: StepResult, vocab_size: int) -> Committed:
        """Apply rank 0's result of a step. Raises ProtocolError for a result of another shape."""
        failures = step.failures(result)
        tokens = step.tokens(result, vocab_size)
        if result.logprobs is not None:
            step.check_logprobs(result.logprobs)
        if result.prompt_logprobs is not None:
            step.check_prompt_logprobs(result.prompt_logprobs)
        self._counters.steps += 1
        endings = self._endings(step, failures)
        failed = {ending.sequence for ending in endings}
        for chunk in step.chunks:
            is_alive = self._table.holds(chunk.slot, chunk.generation)
            if is_alive and chunk.sequence not in failed:
                chunk.sequence.num_computed = chunk.end
                self._running.register(chunk.sequence)
        scores = self._commit_scores(step, failed, result.prompt_logprobs)
        committed = self._commit_tokens(step, failures, tokens, result.logprobs)
        deltas = ending_deltas(endings) + scores + committed.deltas
        return Committed(deltas, [*failed, *committed.ended])

    def _commit_scores(
        self, step: PlannedStep, failed: set[Sequence], scores: LogprobColumns | None
    ) -> list[Addressed]:
        """Return what frontends lack of log-probabilities of prompts."""
        if scores is None:
            return []
        rows = np.frombuffer(scores.rows, np.int32)
        positions = np.frombuffer(scores.positions, np.int32)
        scored: list[tuple[Sequence, LogprobColumns]] = []
        for row in np.unique(rows).tolist():
            chunk = step.chunks[row - len(step.decodes)]
            sequence = chunk.sequence
            is_alive = self._table.holds(chunk.slot, chunk.generation) and sequence not in failed
            # One that starts again after a preemption scores again what has been told.
            is_new = (rows == row) & (positions >= sequence.num_scored)
            if is_alive and is_new.any():
                scored.append((sequence, pick_logprobs(scores, is_new)))
                sequence.num_scored = int(positions[is_new].max()) + 1
        return score_deltas(scored)

    def _endings(self, step: PlannedStep, failures: list[Failure]) -> list[Ending]:
        endings: list[Ending] = []
        for failure in failures:
            slot, generation = step.use_of_row(failure.row)
            if self._table.holds(slot, generation):
                sequence = self._table.sequence(slot)
                self._table.sync(sequence)
                endings.append(Ending(sequence, failure.code))
        return endings

    def _commit_tokens(
        self,
        step: PlannedStep,
        failures: list[Failure],
        tokens: NDArray[np.int32],
        logprobs: LogprobColumns | None,
    ) -> Committed:
        """Append each sampled token to its sequence, if that is still in its slot."""
        rows, plan_rows = step.sampled, None
        if failures or step.changes != self._table.changes:
            wanted = self._table.generation[rows.slots] == rows.generations
            wanted &= ~np.isin(step.sampled_rows(), [failure.row for failure in failures])
            picks = np.flatnonzero(wanted)
            self._counters.dropped_tokens += len(rows) - len(picks)
            rows, tokens = self._table.rows(rows.slots[picks]), tokens[picks]
            plan_rows = step.sampled_rows()[picks]
        if not rows:
            return Committed([], [])
        self._counters.output_tokens += len(rows)
        first_index = self._table.output_index[rows.slots]
        self._table.recent[rows.slots, first_index & (RECENT_TOKENS - 1)] = tokens
        index = first_index + 1
        self._table.output_index[rows.slots] = index
        reasons = self._settle(rows, index, tokens)
        deltas: list[Addressed] = []
        for audience in self._table.audiences(rows):
            scored = None
            if logprobs is not None:
                all_rows = step.sampled_rows() if plan_rows is None else plan_rows
                picked = all_rows if audience.picks is None else all_rows[audience.picks]
                scored = select_logprobs(logprobs, picked, step.num_rows)
            deltas.append(step_deltas(audience, first_index, tokens, reasons, scored))
        if reasons is None:
            return Committed(deltas, [])
        ended = rows.slots[np.flatnonzero(reasons)].tolist()
        return Committed(deltas, [self._table.sequence(slot) for slot in ended])

    def _settle(
        self, rows: Rows, index: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> NDArray[np.int32] | None:
        """Look at the rows that need it; return every row's terminal reason, None if all go on."""
        table = self._table
        due = np.flatnonzero(
            (index == table.commit_event[rows.slots]) | (self._running.stop_watch.take(tokens) > 0)
        )
        reasons: NDArray[np.int32] | None = None
        for pick in due.tolist():
            sequence = table.sequence(int(rows.slots[pick]))
            table.sync(sequence)
            reason: Reason | None = sequence.natural_end()
            if reason is None:
                table.expect_output(sequence)
                continue
            if not self._running.is_intact(sequence):
                reason = ErrorCode.INTERNAL
            if reasons is None:
                reasons = np.zeros(len(rows), np.int32)
            reasons[pick] = reason
        return reasons

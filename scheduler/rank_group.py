"""The ranks as one: a step is answered when every rank has answered it.

Collects the ranks' results of the unanswered steps, compares their digests, hands rank 0's results
on in step order, and knows until when the oldest step has to be answered. It does not know what a
plan or a result contains. Its times are seconds on any clock that never goes back.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.errors import ProcessError, ProtocolError
from protocol.messages import StepResult

TOKENS_A_TIMEOUT = 1024
"""Prompt tokens for which a step gets the step timeout once more: to be slow is not to be stuck."""


@dataclass(slots=True)
class _Pending:
    step_id: int
    prompt_tokens: int
    """In its chunks."""
    results: dict[int, StepResult] = field(default_factory=dict)
    """By rank."""


class Answered(NamedTuple):
    """Rank 0's result of a step that every rank has answered."""

    result: StepResult
    seconds: float
    """From the step's beginning to the last rank's answer."""


class RankGroup:
    """The unanswered steps of a group of ranks."""

    def __init__(self, num_ranks: int, step_timeout_s: float) -> None:
        self._num_ranks = num_ranks
        self._step_timeout_s = step_timeout_s
        self._pending: deque[_Pending] = deque()
        self._answered_step = [0] * num_ranks
        # When the oldest unanswered step began: its plan was sent or the step before it answered,
        # whichever came later. A plan that waits behind another one is not late.
        self._began = 0.0

    def sent(self, step_id: int, now: float, *, prompt_tokens: int) -> None:
        """Note that a plan has been sent to every rank, with so many tokens in its chunks."""
        if not self._pending:
            self._began = now
        self._pending.append(_Pending(step_id, prompt_tokens))

    def receive(self, rank: int, result: StepResult, now: float) -> list[Answered]:
        """Take one rank's result; return rank 0's of the steps that are answered by it, in order.

        A repeated result is ignored. Raises ProtocolError for a result of a step that was not
        sent or is not the rank's next, ProcessError when ranks have computed different things.
        """
        if result.step_id <= self._answered_step[rank]:
            return []
        expected = self._answered_step[rank] + 1
        pending = next((each for each in self._pending if each.step_id == result.step_id), None)
        if pending is None or result.step_id != expected:
            raise ProtocolError(
                f"Rank {rank} answers step {result.step_id} where step {expected} is its next."
            )
        self._answered_step[rank] = result.step_id
        pending.results[rank] = result
        answered: list[Answered] = []
        while self._pending and len(self._pending[0].results) == self._num_ranks:
            oldest = self._pending.popleft()
            _compare_digests(oldest)
            answered.append(Answered(oldest.results[0], now - self._began))
            self._began = now
        return answered

    def deadline(self) -> float | None:
        """Return until when the oldest unanswered step has to be answered; None: there is none."""
        return self._began + self._limit_s(self._pending[0]) if self._pending else None

    def check(self, now: float) -> None:
        """Raise ProcessError if the oldest step is late, naming the ranks that are missing."""
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return
        oldest = self._pending[0]
        missing = [rank for rank in range(self._num_ranks) if rank not in oldest.results]
        raise ProcessError(
            f"Step {oldest.step_id} has no answer of {_name(missing)} after "
            f"{now - self._began:.1f} s; with {oldest.prompt_tokens} prompt tokens it may take "
            f"{self._limit_s(oldest):.1f} s (--step-timeout {self._step_timeout_s:g})."
        )

    def _limit_s(self, step: _Pending) -> float:
        return self._step_timeout_s * (1 + step.prompt_tokens / TOKENS_A_TIMEOUT)


def _compare_digests(pending: _Pending) -> None:
    ranks_by_digest: dict[int, list[int]] = {}
    for rank in sorted(pending.results):
        ranks_by_digest.setdefault(pending.results[rank].digest, []).append(rank)
    if len(ranks_by_digest) > 1:
        sides = " and ".join(
            f"{_name(ranks)} ({digest:#010x})" for digest, ranks in ranks_by_digest.items()
        )
        raise ProcessError(
            f"The ranks disagree about step {pending.step_id}: {sides} have different digests of "
            "plans and tokens."
        )


def _name(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

"""Runs plans in step order, each once, and remembers the answers.

A scheduler that did not get an answer sends the plan again. The step must not run twice, for it
would sample from a state that has moved on; so a repeated plan gets the stored result.
"""

import zlib
from collections import deque

from protocol.errors import ProtocolError
from protocol.messages import StepPlan, StepResult
from worker.runner import StepOutput, StepRunner

KEPT_RESULTS = 64
"""Far more than the plans a scheduler leaves unanswered."""


class Steps:
    """The steps of one rank since it started.

    Step ids may start anywhere, since a lost first plan is the connection's to notice, and then
    count by one. With `reports` results carry tokens; without (a rank above 0) only the digest.
    """

    def __init__(self, runner: StepRunner, *, reports: bool) -> None:
        self._runner = runner
        self._reports = reports
        self._results: deque[StepResult] = deque(maxlen=KEPT_RESULTS)
        self._digest = 0

    @property
    def last_step_id(self) -> int:
        """The newest step that has run; 0 before the first."""
        return self._results[-1].step_id if self._results else 0

    @property
    def has_run(self) -> bool:
        """Return whether any step has run: whether the slots hold anything."""
        return bool(self._results)

    def answer(self, plan: StepPlan, frame: bytes) -> StepResult:
        """Run a plan, or find the result of one that has run.

        `frame` is the plan as it came; it goes into the digest. Raises ProtocolError for a step
        that is neither the next one nor one whose result is kept.
        """
        if self._results and plan.step_id != self.last_step_id + 1:
            return self._stored(plan.step_id)
        output = self._runner.execute(plan)
        tokens = output.tokens.tobytes()
        # Chained: ranks that once differed differ in every later digest.
        self._digest = zlib.crc32(tokens, zlib.crc32(frame, self._digest))
        result = self._result(plan.step_id, tokens, output)
        self._results.append(result)
        return result

    def _result(self, step_id: int, tokens: bytes, output: StepOutput) -> StepResult:
        if not self._reports:
            return StepResult(step_id=step_id, digest=self._digest)
        return StepResult(
            step_id=step_id,
            digest=self._digest,
            tokens=tokens,
            counts=output.counts.tobytes(),
            failures=output.failures.tobytes(),
            logprobs=output.logprobs,
        )

    def _stored(self, step_id: int) -> StepResult:
        first, last = self._results[0].step_id, self._results[-1].step_id
        if not first <= step_id <= last:
            raise ProtocolError(
                f"Plan of step {step_id} came; this rank can run step {last + 1} or repeat the "
                f"results of {first} to {last}."
            )
        return self._results[step_id - first]

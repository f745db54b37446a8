"""Runs plans in step order, each once, and remembers the answers.

A scheduler that did not get an answer sends the plan again. The step must not run twice, for it
would sample from a state that has moved on; so a repeated plan gets the stored result.
"""

import zlib
from collections import deque
from collections.abc import Iterator

from protocol.errors import ProtocolError
from protocol.messages import StepPlan, StepResult
from worker.runner import LaunchedStep, StepOutput, StepRunner

KEPT_RESULTS = 64
"""Far more than the plans a scheduler leaves unanswered."""


class Steps:
    """The steps of one rank since it started: launched in order, then finished in order.

    Step ids may start anywhere, since a lost first plan is the connection's to notice, and then
    count by one. With `reports` results carry tokens; without (a rank above 0) only the digest.
    """

    def __init__(self, runner: StepRunner, *, reports: bool) -> None:
        self._runner = runner
        self._reports = reports
        self._computing: deque[tuple[StepPlan, bytes, LaunchedStep]] = deque()
        self._results: deque[StepResult] = deque(maxlen=KEPT_RESULTS)
        self._digest = 0

    @property
    def last_step_id(self) -> int:
        """The newest step that has finished; 0 before the first."""
        return self._results[-1].step_id if self._results else 0

    @property
    def has_run(self) -> bool:
        """Return whether any step has been launched: whether the slots hold anything."""
        return bool(self._results or self._computing)

    @property
    def is_computing(self) -> bool:
        """Return whether a step is launched and not finished."""
        return bool(self._computing)

    def launch(self, plan: StepPlan, frame: bytes) -> StepResult | None:
        """Start a plan; or return the result of one that has finished and is asked for again.

        `frame` is the plan as it came; it goes into the digest. A plan that comes again while it
        computes is answered once, when it has finished. Raises ProtocolError for a step that is
        neither the next one nor one whose result is kept.
        """
        if self.has_run and plan.step_id != self._last_launched + 1:
            return self._repeated(plan.step_id)
        self._computing.append((plan, frame, self._runner.launch(plan)))
        return None

    def finished(self) -> Iterator[StepResult]:
        """Yield the results of steps that have finished since the last call, in order."""
        while self._computing and self._computing[0][2].is_done():
            plan, frame, step = self._computing.popleft()
            output = step.output()
            tokens = output.tokens.tobytes()
            # Chained: ranks that once differed differ in every later digest.
            self._digest = zlib.crc32(tokens, zlib.crc32(frame, self._digest))
            result = self._result(plan.step_id, tokens, output)
            self._results.append(result)
            yield result

    @property
    def _last_launched(self) -> int:
        return self._computing[-1][0].step_id if self._computing else self.last_step_id

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
            prompt_logprobs=output.prompt_logprobs,
        )

    def _repeated(self, step_id: int) -> StepResult | None:
        if any(plan.step_id == step_id for plan, _, _ in self._computing):
            return None
        for result in self._results:
            if result.step_id == step_id:
                return result
        kept = (
            f" or repeat the results of {self._results[0].step_id} to {self._results[-1].step_id}"
            if self._results
            else ""
        )
        raise ProtocolError(
            f"Plan of step {step_id} came; this rank can run step {self._last_launched + 1}{kept}."
        )

import zlib

import numpy as np
import pytest

from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import EngineFacts, LogprobColumns, StepPlan, StepResult
from tests.worker.plan_builder import make_facts, make_plan
from worker.runner import LaunchedStep, StepOutput
from worker.steps import KEPT_RESULTS, Steps

LOGPROBS = LogprobColumns()


class Step:
    """A step that is done when told so."""

    def __init__(self, step_id: int, *, done: bool) -> None:
        self.step_id = step_id
        self.done = done

    def is_done(self) -> bool:
        return self.done

    def output(self) -> StepOutput:
        assert self.done
        return StepOutput(
            tokens=np.array([self.step_id], dtype=np.int32),
            counts=np.array([1, -1], dtype=np.int32),
            failures=np.array([ErrorCode.NUMERIC], dtype=np.int32),
            logprobs=LOGPROBS,
        )


class CountingRunner:
    """Answers each step with its id as the token, and keeps them all."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.is_slow = is_slow
        self.steps: list[Step] = []

    @property
    def facts(self) -> EngineFacts:
        return make_facts()

    @property
    def launched(self) -> list[int]:
        return [step.step_id for step in self.steps]

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.steps.append(Step(plan.step_id, done=not self.is_slow))
        return self.steps[-1]


@pytest.fixture
def runner() -> CountingRunner:
    return CountingRunner()


def answer(steps: Steps, step_id: int, frame: bytes | None = None) -> StepResult:
    stored = steps.launch(make_plan(step_id), frame or b"frame %d" % step_id)
    if stored is not None:
        return stored
    (result,) = steps.finished()
    return result


def test_rule_6_the_digest_chains_frames_and_tokens(runner: CountingRunner) -> None:
    steps = Steps(runner, reports=True)
    first = zlib.crc32(b"frame 1" + b"\1\0\0\0")
    assert answer(steps, 1).digest == first
    assert answer(steps, 2).digest == zlib.crc32(b"frame 2" + b"\2\0\0\0", first)


def test_rank_0_reports_columns(runner: CountingRunner) -> None:
    result = answer(Steps(runner, reports=True), 5)
    assert (result.step_id, result.tokens) == (5, b"\5\0\0\0")
    assert result.counts == b"\1\0\0\0\xff\xff\xff\xff"
    assert result.failures == b"\x69\0\0\0"
    assert result.logprobs is LOGPROBS


def test_other_ranks_report_the_same_digest_and_nothing_else(runner: CountingRunner) -> None:
    result = answer(Steps(runner, reports=False), 5)
    digest = answer(Steps(runner, reports=True), 5).digest
    assert result == StepResult(step_id=5, digest=digest)


def test_a_step_runs_once(runner: CountingRunner) -> None:
    steps = Steps(runner, reports=True)
    results = [answer(steps, step_id) for step_id in (1, 2, 3)]
    # The repeat comes in a frame of its own, which must not touch the digest.
    assert [answer(steps, step_id, b"again") for step_id in (1, 2, 3)] == results
    assert runner.launched == [1, 2, 3]
    assert answer(steps, 4).digest == zlib.crc32(b"frame 4" + b"\4\0\0\0", results[2].digest)


@pytest.mark.parametrize("step_id", [9, 13, 14])
def test_step_ids_have_no_gaps(runner: CountingRunner, step_id: int) -> None:
    steps = Steps(runner, reports=True)
    assert (steps.has_run, steps.last_step_id) == (False, 0)
    answer(steps, 10)
    answer(steps, 11)
    assert (steps.has_run, steps.last_step_id) == (True, 11)
    with pytest.raises(ProtocolError) as caught:
        answer(steps, step_id)
    assert str(caught.value) == (
        f"Plan of step {step_id} came; this rank can run step 12 or repeat the results of 10 to 11."
    )


def test_only_the_newest_results_are_kept(runner: CountingRunner) -> None:
    steps = Steps(runner, reports=True)
    for step_id in range(1, KEPT_RESULTS + 2):
        answer(steps, step_id)
    assert answer(steps, 2).step_id == 2
    with pytest.raises(ProtocolError, match="repeat the results of 2 to 65"):
        answer(steps, 1)


def test_a_plan_is_launched_while_another_computes() -> None:
    runner = CountingRunner(is_slow=True)
    steps = Steps(runner, reports=True)
    assert not steps.is_computing
    assert [steps.launch(make_plan(step_id), b"") for step_id in (1, 2)] == [None, None]
    assert (steps.is_computing, steps.has_run, steps.last_step_id) == (True, True, 0)
    assert list(steps.finished()) == []
    # Results come in step order, whichever is known to be done first.
    runner.steps[1].done = True
    assert list(steps.finished()) == []
    runner.steps[0].done = True
    assert [result.step_id for result in steps.finished()] == [1, 2]
    assert (steps.is_computing, steps.last_step_id) == (False, 2)


def test_a_plan_that_comes_again_while_it_computes_is_answered_once() -> None:
    runner = CountingRunner(is_slow=True)
    steps = Steps(runner, reports=True)
    assert [steps.launch(make_plan(7), frame) for frame in (b"frame", b"again")] == [None, None]
    assert runner.launched == [7]
    with pytest.raises(ProtocolError, match=r"^Plan of step 9 came; this rank can run step 8\.$"):
        steps.launch(make_plan(9), b"")
    runner.steps[0].done = True
    assert [result.digest for result in steps.finished()] == [zlib.crc32(b"frame" + b"\7\0\0\0")]

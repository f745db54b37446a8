import zlib

import numpy as np
import pytest

from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import EngineFacts, LogprobColumns, StepPlan, StepResult
from tests.worker.plan_builder import make_facts, make_plan
from worker.runner import StepOutput
from worker.steps import KEPT_RESULTS, Steps

LOGPROBS = LogprobColumns()


class CountingRunner:
    """Answers each step with its id as the token, and keeps count."""

    def __init__(self) -> None:
        self.executed: list[int] = []

    @property
    def facts(self) -> EngineFacts:
        return make_facts()

    def execute(self, plan: StepPlan) -> StepOutput:
        self.executed.append(plan.step_id)
        return StepOutput(
            tokens=np.array([plan.step_id], dtype=np.int32),
            counts=np.array([1, -1], dtype=np.int32),
            failures=np.array([ErrorCode.NUMERIC], dtype=np.int32),
            logprobs=LOGPROBS,
        )


@pytest.fixture
def runner() -> CountingRunner:
    return CountingRunner()


def answer(steps: Steps, step_id: int) -> StepResult:
    return steps.answer(make_plan(step_id), b"frame %d" % step_id)


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
    assert [steps.answer(make_plan(step_id), b"again") for step_id in (1, 2, 3)] == results
    assert runner.executed == [1, 2, 3]
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

"""Random mixes of everything that can happen to the scheduler, against the oracle."""

from dataclasses import dataclass
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.columns import pack_int32
from protocol.errors import ErrorCode, RequestError
from protocol.messages import AddSequence, SamplingParams
from protocol.validation import longest_sequence
from scheduler import prefix_finder, prefix_groups, step_cost
from scheduler.policy import LatencyPolicy, Policy, ThroughputPolicy
from tests.scheduler.simulation import Simulation, expected_output, simulate

A_STEP_S = 0.001
FAMILIES = [[(7 * i + 11 * family) % 37 for i in range(64)] for family in range(3)]
"""Prompts start like one of these, so that many share prefixes."""


@dataclass(frozen=True)
class Add:
    family: int
    shared: int
    length: int
    max_tokens: int
    seed: int
    priority: int
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    deadline: int | None
    domain: int
    frontend: int
    samples: int
    resumed: int


@dataclass(frozen=True)
class Abort:
    which: int
    all_samples: bool


@dataclass(frozen=True)
class Plan:
    failing: int | None
    """Row that fails, modulo the rows there may be; -1: all of them, out of memory."""


class Answer:
    pass


class ResetCache:
    """Whatever was written before is never found again: the rank looks."""


@dataclass(frozen=True)
class Steps:
    """As many plans as may be in flight, then an answer, several times."""

    count: int


@dataclass(frozen=True)
class Expire:
    seconds: int


ADDS = st.builds(
    Add,
    family=st.integers(0, 2),
    shared=st.integers(0, 24),
    length=st.integers(1, 26),
    max_tokens=st.integers(1, 24),
    seed=st.integers(0, 3),
    priority=st.sampled_from([0, 0, 0, 1, -1]),
    stop_token_ids=st.sampled_from([(), (), (3,), (5, 9, 30)]),
    min_tokens=st.integers(0, 3),
    deadline=st.none() | st.integers(1, 20),
    domain=st.sampled_from([0, 0, 0, 1]),
    frontend=st.integers(0, 1),
    samples=st.sampled_from([1, 1, 1, 2, 3]),
    resumed=st.sampled_from([0, 0, 0, 1, 5]),
)
ACTIONS = st.one_of(
    ADDS,
    ADDS,
    st.builds(Abort, which=st.integers(0, 30), all_samples=st.booleans()),
    st.builds(Steps, count=st.integers(1, 6)),
    st.builds(Steps, count=st.integers(1, 6)),
    st.builds(Plan, failing=st.sampled_from([None, None, None, None, -1, 0, 1, 2])),
    st.builds(Answer),
    st.builds(Expire, seconds=st.integers(0, 4)),
    st.builds(ResetCache),
)
POLICIES: list[Policy] = [
    ThroughputPolicy(budget=9),
    ThroughputPolicy(budget=64),
    LatencyPolicy(budget=7),
    LatencyPolicy(budget=4),
]


class Walk:
    """Carries out actions on a simulation and checks everything after each."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.longest = longest_sequence(simulation.facts)
        self.now = 0
        self.num_requests = 0
        self.refused: list[ErrorCode] = []

    def do(self, action: Add | Abort | Plan | Answer | Steps | Expire | ResetCache) -> None:
        match action:
            case Add():
                self._add(action)
            case Abort():
                self._abort(action)
            case Plan():
                self._plan(action)
            case Answer():
                self.simulation.answer(A_STEP_S)
            case Steps():
                for _ in range(action.count):
                    while self.simulation.plan() is not None:
                        self.simulation.scheduler.check_invariants()
                    self.simulation.answer(A_STEP_S)
            case ResetCache():
                num_indexed = self.simulation.scheduler.block_manager.num_indexed
                assert self.simulation.reset_prefix_cache() == num_indexed
            case Expire():
                self.now += action.seconds
                self.simulation.deliver(self.simulation.scheduler.expire(float(self.now)))
        self.simulation.scheduler.check_invariants()

    def _add(self, action: Add) -> None:
        request_id, self.num_requests = self.num_requests, self.num_requests + 1
        own = [(action.seed + 5 * i) % 37 for i in range(action.length)]
        prompt = (FAMILIES[action.family][: action.shared] + own)[: action.length]
        params = SamplingParams(
            seed=action.seed,
            max_tokens=action.max_tokens,
            min_tokens=min(action.min_tokens, action.max_tokens),
            stop_token_ids=list(action.stop_token_ids),
        )
        output, _ = expected_output(prompt, params, self.longest)
        resume = output[: min(action.resumed, len(output) - 1)]
        for sample in range(action.samples):
            message = AddSequence(
                request_id=request_id,
                sample=sample,
                prompt_ids=pack_int32(prompt),
                params=params,
                cache_domain=b"%d" % action.domain,
                priority=action.priority,
                deadline=None if action.deadline is None else float(self.now + action.deadline),
                resume_ids=pack_int32(resume),
                next_index=len(resume) // 2,
            )
            try:
                self.simulation.add(message, action.frontend)
            except RequestError as error:
                too_long = error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
                self.refused.append(error.code)
                if too_long is not (len(prompt) >= self.longest):
                    raise

    def _abort(self, action: Abort) -> None:
        sample = -1 if action.all_samples else action.which % 3
        self.simulation.abort(action.which % (self.num_requests + 1), sample, action.which % 2)

    def _plan(self, action: Plan) -> None:
        failing: dict[int, ErrorCode] = {}
        if action.failing is not None:
            rows = range(8) if action.failing < 0 else [action.failing]
            code = ErrorCode.OUT_OF_MEMORY if action.failing < 0 else ErrorCode.NUMERIC
            failing = dict.fromkeys(rows, code)
        self.simulation.plan(failing)


@pytest.mark.slow
@settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    actions=st.lists(ACTIONS, min_size=30, max_size=80),
    policy=st.sampled_from(POLICIES),
    max_in_flight=st.sampled_from([1, 2]),
    prefix_key=st.sampled_from([None, b"key"]),
    num_blocks=st.integers(2, 14),
    block_size=st.sampled_from([1, 2, 4]),
    worth_waiting=st.sampled_from([1, 6, 256]),
    group_tokens=st.sampled_from([1, 4]),
    host_blocks=st.sampled_from([0, 0, 5, 30]),
)
def test_every_output_is_the_oracles(
    actions,
    policy,
    max_in_flight,
    prefix_key,
    num_blocks,
    block_size,
    worth_waiting,
    group_tokens,
    host_blocks,
):
    # At their real sizes no prompt here would ever wait for another or be in a group, nor would
    # any step's cost become known.
    with (
        patch.object(prefix_finder, "WORTH_WAITING_TOKENS", worth_waiting),
        patch.object(prefix_groups, "GROUP_TOKENS", group_tokens),
        patch.object(prefix_groups, "GROUP_ROWS", 2),
        patch.object(step_cost, "ENOUGH", 1),
    ):
        simulation = simulate(
            num_blocks=num_blocks,
            block_size=block_size,
            slots=5,
            policy=policy,
            max_in_flight=max_in_flight,
            prefix_key=prefix_key,
            max_waiting_requests=20,
            max_waiting_tokens=200,
            sources=2,
            host_blocks=host_blocks,
        )
        scheduler = simulation.scheduler
        walk = Walk(simulation)
        for action in actions:
            walk.do(action)
        simulation.run()
    assert set(walk.refused) <= {ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.OVERLOADED}
    simulation.check_outputs()
    scheduler.check_invariants()
    assert scheduler.num_free_blocks == num_blocks
    assert scheduler.swap_space.num_free == host_blocks
    assert scheduler.num_running == 0
    assert scheduler.waiting_requests == 0
    assert scheduler.waiting_tokens == 0

"""Times the scheduler's core in steady decode: `python -m benchmarks.scheduler`.

A step here is everything that the scheduler process does for it between two waits, but the
sockets: decode the result's frame, commit, encode the deltas, schedule, encode the plan. Prints a
JSON line for each number of running sequences, with the median over the steps, in microseconds and
in bytes of the plan's frame, and with the milliseconds that a self-check then takes; then one for
what the prefix index costs a block of a long prompt.
"""

import argparse
import json
import platform
import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from benchmarks.environment import commit, cpu_name, today
from benchmarks.flags import whole
from protocol.columns import pack_int32
from protocol.connection import Codec, Outgoing
from protocol.messages import (
    AddSequence,
    EngineFacts,
    SamplingParams,
    StepPlan,
    StepResult,
    WorkerToScheduler,
)
from scheduler.policy import THROUGHPUT_BUDGET, ThroughputPolicy
from scheduler.prefix import PrefixChain, PrefixHasher
from scheduler.scheduler import Scheduler

VOCAB_SIZE = 151_936
PROMPT_TOKENS = range(128, 384)
"""Lengths are drawn from these, so that sequences fill their blocks in different steps."""
MAX_RUNNING = THROUGHPUT_BUDGET - PROMPT_TOKENS.stop
"""Beside so many rows a step still has room for the longest prompt."""


def main() -> None:
    """Run with the command line's sizes and print the line."""
    arguments = parse_arguments()
    settings = vars(arguments)
    for running in settings.pop("running"):
        steps, check_s = measure(
            running,
            arguments.block_size,
            arguments.steps,
            arguments.frontends,
            arguments.max_in_flight,
        )
        timings = [step.seconds * 1e6 for step in steps]
        row = {
            "bench": "scheduler",
            "running": running,
            "us_per_step": round(statistics.median(timings), 1),
            "us_mean": round(statistics.fmean(timings), 1),
            "us_p99": round(percentile_99(timings), 1),
            "check_ms": round(check_s * 1e3, 1),
            "plan_bytes": round(statistics.median(step.plan_bytes for step in steps)),
            **settings,
            "python": platform.python_version(),
            "device": cpu_name(),
            "commit": commit(),
            "date": today(),
        }
        print(json.dumps(row), flush=True)
    place = {"device": cpu_name(), "commit": commit(), "date": today()}
    us_per_block = round(hash_long_prompt(arguments.block_size) * 1e6, 2)
    row = {"bench": "hashing", "block_size": arguments.block_size, "us_per_block": us_per_block}
    print(json.dumps(row | place), flush=True)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; exits with code 2 and a sentence for what cannot be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=whole(1, MAX_RUNNING), nargs="+", default=[256, 4_096])
    parser.add_argument("--block-size", type=whole(1, 65_536), default=64)
    parser.add_argument("--steps", type=whole(1), default=2_000)
    parser.add_argument("--frontends", type=whole(1), default=1)
    parser.add_argument("--max-in-flight", type=whole(1, 2), default=2)
    return parser.parse_args(argv)


def percentile_99(timings: list[float]) -> float:
    """Return what 99 of 100 timings do not exceed."""
    # Quantiles need two values at least.
    return statistics.quantiles(timings, n=100)[98] if len(timings) > 1 else timings[0]


def hash_long_prompt(block_size: int) -> float:
    """Return the seconds a block that naming a 131,072-token prompt's blocks takes, at best."""
    tokens = array("i", range(131_072))
    num_blocks = len(tokens) // block_size
    rounds: list[float] = []
    for _ in range(5):
        chain = PrefixChain(PrefixHasher(b"benchmark"), b"", block_size)
        start = time.perf_counter()
        chain.block(num_blocks - 1, tokens)
        rounds.append((time.perf_counter() - start) / num_blocks)
    return min(rounds)


class Step(NamedTuple):
    """One step's cost."""

    seconds: float
    plan_bytes: int


def measure(
    running: int, block_size: int, steps: int, frontends: int, max_in_flight: int
) -> tuple[list[Step], float]:
    """Return what each step costs with all sequences decoding, and the seconds of a self-check."""
    # The first still decodes when the last has got through its prompt, and then for all the steps.
    prompt_steps = running * PROMPT_TOKENS.stop // (THROUGHPUT_BUDGET - running)
    output_tokens = steps + prompt_steps + 64
    longest = PROMPT_TOKENS.stop + output_tokens
    facts = EngineFacts(
        rank=0,
        back_end="none",
        block_size=block_size,
        num_blocks=running * (longest // block_size + 2),
        slots=running,
        max_model_len=longest,
        vocab_size=VOCAB_SIZE,
    )
    scheduler = Scheduler(
        facts,
        ThroughputPolicy(),
        max_in_flight=max_in_flight,
        prefix_key=b"benchmark",
        max_waiting_requests=running,
        max_waiting_tokens=running * PROMPT_TOKENS.stop,
    )
    generator = random.Random(0)
    for number in range(running):
        length = generator.choice(PROMPT_TOKENS)
        prompt = pack_int32(generator.randrange(VOCAB_SIZE) for _ in range(length))
        params = SamplingParams(seed=0, max_tokens=output_tokens, stop_token_ids=[VOCAB_SIZE - 1])
        message = AddSequence(request_id=number, sample=0, prompt_ids=prompt, params=params)
        scheduler.add(b"frontend-%d" % (number % frontends), message)
    to_ranks, to_frontend = Outgoing(epoch=1), Outgoing(epoch=1)
    codec: Codec[WorkerToScheduler] = Codec(WorkerToScheduler)
    ranks = EchoRanks(generator)
    frames: deque[bytes] = deque()
    timings: list[Step] = []
    while len(timings) < steps:
        while (plan := scheduler.schedule()) is not None:
            frames.append(msgspec.msgpack.encode(ranks.answer(plan)))
        if ranks.num_decoding < running:
            result = codec.decode(frames.popleft())
            assert isinstance(result, StepResult)
            scheduler.commit(result)
            continue
        start = time.perf_counter()
        result = codec.decode(frames.popleft())
        assert isinstance(result, StepResult)
        for addressed in scheduler.commit(result):
            to_frontend.frame(addressed.deltas)
        plan = scheduler.schedule()
        assert plan is not None
        frame = to_ranks.frame(plan)
        timings.append(Step(time.perf_counter() - start, len(frame)))
        frames.append(msgspec.msgpack.encode(ranks.answer(plan)))
    start = time.perf_counter()
    assert not scheduler.check().problems
    return timings, time.perf_counter() - start


class EchoRanks:
    """Answers plans with random tokens."""

    def __init__(self, generator: random.Random) -> None:
        self.num_decoding = 0
        self._generator = generator

    def answer(self, plan: StepPlan) -> StepResult:
        """Return a result of the right shape."""
        if plan.decode is not None:
            self.num_decoding = len(plan.decode) // 4
        lasts = array("i", plan.chunks)[3::4]
        counts = [1] * self.num_decoding + list(lasts)
        tokens = (self._generator.randrange(VOCAB_SIZE - 1) for _ in range(sum(counts)))
        return StepResult(
            step_id=plan.step_id, digest=0, counts=pack_int32(counts), tokens=pack_int32(tokens)
        )


if __name__ == "__main__":
    main()

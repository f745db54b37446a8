"""500 random request mixes through the real scheduler core and the real checksum ranks, in process.

Every plan and every result crosses as a frame, numbered and decoded; answers are held back at
random, so that one or two plans are in flight. What the sequences produce must be what their own
contexts hash to, exactly, and all blocks must be free at the end.
"""

import random
from collections import deque

import msgspec
import pytest

from frontend.deltas import logprobs_by_row
from protocol.columns import pack_int32, unpack_int32, unpack_int64
from protocol.connection import Codec, Outgoing
from protocol.messages import (
    AddSequence,
    EngineFacts,
    FinishReason,
    SamplingParams,
    SchedulerToWorker,
    WorkerToScheduler,
)
from protocol.sampling import sampling
from scheduler import prefix_finder, prefix_groups
from scheduler.policy import LatencyPolicy, ThroughputPolicy
from scheduler.scheduler import Scheduler
from worker.checksum import checksum_token
from worker.checksum_runner import ChecksumRunner
from worker.steps import Steps

VOCABULARY = 500
NUM_MIXES = 500
SOURCE = b"frontend"


class Mix:
    """One random mix of requests, and the engine's core it runs through."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 16])
        self.facts = EngineFacts(
            rank=0,
            back_end="checksum",
            block_size=block_size,
            # Room for one long sequence, or a few: they get in each other's way.
            num_blocks=rng.randint(24, 96) // block_size + 1,
            slots=rng.randint(1, 8),
            max_model_len=rng.randint(24, 80),
            vocab_size=VOCABULARY,
        )
        policy = rng.choice([LatencyPolicy, ThroughputPolicy])
        self.scheduler = Scheduler(
            self.facts,
            policy(rng.choice([4, 16, 64, 512])),
            max_in_flight=1 + seed % 2,
            prefix_key=b"key" if rng.random() < 0.8 else None,
            max_waiting_requests=100,
            max_waiting_tokens=10_000,
        )
        self.steps = Steps(ChecksumRunner(self.facts), reports=True)
        self.plans: deque[bytes] = deque()
        self.to_rank, self.to_scheduler = Outgoing(epoch=1), Outgoing(epoch=1)
        self.decode_plan = Codec(SchedulerToWorker).decode
        self.decode_result = Codec(WorkerToScheduler).decode
        # By request and sample.
        self.asked: dict[tuple[int, int], tuple[list[int], SamplingParams]] = {}
        self.outputs: dict[tuple[int, int], list[int]] = {}
        # Prompt tokens as their log-probabilities have them.
        self.scored: dict[tuple[int, int], list[int]] = {}
        self.reasons: dict[tuple[int, int], int] = {}
        self.aborted: set[tuple[int, int]] = set()
        self.num_requests = 0
        self.num_copies = self.num_groups = 0
        self.longest = min(self.facts.max_model_len, self.facts.num_blocks * self.facts.block_size)
        self.prefixes = [self._tokens(self.longest // 2) for _ in range(2)]

    def _tokens(self, count):
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def add(self):
        prefix = self.rng.choice(self.prefixes)
        prompt = prefix[: self.rng.randint(0, len(prefix))]
        prompt += self._tokens(self.rng.randint(1, max(1, self.longest - len(prompt) - 1)))
        prompt = prompt[: self.longest - 1]
        params = SamplingParams(
            temperature=self.rng.choice([0.0, 0.7]),
            seed=self.rng.getrandbits(60),
            max_tokens=self.rng.randint(1, 40),
            stop_token_ids=self._tokens(self.rng.choice([0, 0, 20])),
            prompt_logprobs=1 if self.num_requests % 4 == 3 else None,
        )
        for sample in range(self.rng.choice([1, 1, 1, 3])):
            own = msgspec.structs.replace(params, seed=params.seed + sample)
            self.asked[self.num_requests, sample] = (prompt, own)
            self.outputs[self.num_requests, sample] = []
            self.scored[self.num_requests, sample] = []
            message = AddSequence(
                request_id=self.num_requests,
                sample=sample,
                prompt_ids=pack_int32(prompt),
                params=own,
            )
            assert self.scheduler.add(SOURCE, message) == []
        self.num_requests += 1

    def abort(self):
        if self.asked:
            request, sample = key = self.rng.choice(list(self.asked))
            self.scheduler.abort(SOURCE, request, sample)
            if key not in self.reasons:
                self.aborted.add(key)

    def step(self):
        """Plan what may be in flight; answer at least one plan where no more may be."""
        while (plan := self.scheduler.schedule()) is not None:
            self.num_copies += len(plan.copies) // 8
            self.num_groups += bool(plan.groups)
            self.plans.append(self.to_rank.frame(plan))
            if self.rng.random() < 0.5:
                return
        if self.plans:
            frame = self.plans.popleft()
            assert self.steps.launch(self.decode_plan(frame), frame) is None
            (result,) = self.steps.finished()
            answer = self.decode_result(self.to_scheduler.frame(result))
            for source, deltas in self.scheduler.commit(answer):
                assert source == SOURCE
                self.take(deltas)

    def take(self, deltas):
        tokens = iter(unpack_int32(deltas.token_ids))
        scores = logprobs_by_row(deltas.prompt_logprobs)
        rows = enumerate(
            zip(
                unpack_int64(deltas.requests),
                unpack_int32(deltas.samples),
                unpack_int32(deltas.first_index),
                unpack_int32(deltas.counts),
                unpack_int32(deltas.reasons),
                strict=True,
            )
        )
        for row, (*key, first, count, reason) in rows:
            sequence = tuple(key)
            for entry in scores.get(row, []):
                assert not self.outputs[sequence], "a prompt is scored before its first token"
                self.scored[sequence].append(entry.ids[0])
                assert entry.position == len(self.scored[sequence]), "a gap or a repetition"
            assert sequence not in self.aborted, "a delta after the abort was acknowledged"
            assert sequence not in self.reasons, "a delta after the terminal reason"
            assert first == len(self.outputs[sequence]), "a gap or a repetition"
            self.outputs[sequence] += [next(tokens) for _ in range(count)]
            if reason:
                self.reasons[sequence] = reason

    def expected(self, sequence):
        prompt, params = self.asked[sequence]
        context, output = list(prompt), []
        while True:
            token = checksum_token(context, params.seed, sampling(params).temperature, VOCABULARY)
            context.append(token)
            output.append(token)
            if token in params.stop_token_ids:
                return output, FinishReason.STOP
            if len(output) == params.max_tokens or len(context) == self.longest:
                return output, FinishReason.LENGTH

    def run(self):
        for _ in range(self.rng.randint(3, 12)):
            self.add()
            for _ in range(self.rng.randint(0, 12)):
                self.step()
            if self.rng.random() < 0.2:
                self.abort()
        for _ in range(10_000):
            if self.scheduler.num_live == 0 and not self.plans:
                break
            self.step()
        self.check()
        return self.scheduler.counters

    def check(self):
        assert self.scheduler.num_live == 0
        for sequence in self.asked:
            output, reason = self.expected(sequence)
            if sequence in self.aborted:
                assert self.outputs[sequence] == output[: len(self.outputs[sequence])]
            else:
                assert self.outputs[sequence] == output
                assert self.reasons[sequence] == reason
                prompt, params = self.asked[sequence]
                wanted = [] if params.prompt_logprobs is None else prompt[1:]
                assert self.scored[sequence] == wanted
        self.scheduler.check_invariants()
        assert self.scheduler.num_free_blocks == self.facts.num_blocks


@pytest.mark.slow
def test_500_random_mixes_are_exact(monkeypatch: pytest.MonkeyPatch):
    # At their real sizes no prompt here would ever wait for another or be in a group.
    monkeypatch.setattr(prefix_finder, "WORTH_WAITING_TOKENS", 8)
    monkeypatch.setattr(prefix_groups, "GROUP_TOKENS", 4)
    monkeypatch.setattr(prefix_groups, "GROUP_ROWS", 2)
    preemptions = cached = copies = groups = 0
    for seed in range(NUM_MIXES):
        mix = Mix(seed)
        counters = mix.run()
        copies += mix.num_copies
        groups += mix.num_groups
        preemptions += counters.preemptions
        cached += counters.cached_tokens + counters.resumed_cached_tokens
    assert preemptions > 200, "the mixes no longer preempt"
    assert cached > 10_000, "the mixes no longer share prefixes"
    assert copies > 200, "the mixes no longer copy blocks"
    assert groups > 200, "the mixes no longer have groups"

"""Nobody starves: the bound on admissions, held against adversaries, and what stands behind it."""

import random
from dataclasses import dataclass, field

import pytest

from protocol.errors import RequestError
from protocol.messages import FinishReason
from scheduler.policy import LatencyPolicy, ThroughputPolicy
from scheduler.sequence import MAX_PASSES, Sequence
from tests.scheduler.simulation import add_message, simulate


@dataclass
class Wait:
    """A sequence's time in the queue, from its entry to its admission."""

    num_older: int
    """Older ones that lived when it began to wait."""
    num_admitted: int = 0
    """All others since then."""
    num_again: int = 0
    """Older ones of these that had been admitted since then already."""
    seen: set[Sequence] = field(default_factory=set)

    @property
    def bound(self) -> int:
        """The number of the admission that is its own at the latest."""
        return (MAX_PASSES + 1) * (self.num_older + 1) + self.num_again

    def count(self, admitted: Sequence, *, is_older: bool) -> None:
        self.num_admitted += 1
        self.num_again += is_older and admitted in self.seen
        self.seen.add(admitted)


class Watch:
    """Sees every entry into a scheduler's queue and every admission, and holds the bound."""

    def __init__(self, scheduler, monkeypatch):
        self.longest_wait = 0
        self.num_waits = 0
        self.waits: dict[Sequence, Wait] = {}
        self._scheduler = scheduler
        queue = scheduler._queue
        push, admit = queue.push, queue.admit

        def watched_push(sequence):
            # Ageing takes a sequence out and puts it back: it goes on waiting.
            if sequence not in self.waits:
                live = scheduler._roster.sequences()
                older = sum(each.arrival < sequence.arrival for each in live)
                self.waits[sequence] = Wait(older)
            push(sequence)

        def watched_admit(sequence, prefilling, unwilling):
            admit(sequence, prefilling, unwilling)
            wait = self.waits.pop(sequence)
            self.longest_wait = max(self.longest_wait, wait.num_admitted + 1)
            self.num_waits += 1
            for other, its_wait in self.waits.items():
                if other in unwilling:
                    continue  # It waits by its own choice.
                its_wait.count(sequence, is_older=sequence.arrival < other.arrival)
                assert its_wait.num_admitted < its_wait.bound, other.tell()

        monkeypatch.setattr(queue, "push", watched_push)
        monkeypatch.setattr(queue, "admit", watched_admit)

    def forget_ended(self):
        live = set(self._scheduler._roster.sequences())
        for sequence in [each for each in self.waits if each not in live]:
            del self.waits[sequence]


@pytest.mark.parametrize("num_low", [1, 2, 5])
@pytest.mark.parametrize("policy", [ThroughputPolicy(budget=64), LatencyPolicy(budget=64)])
def test_the_bound_is_reached_and_never_passed(policy, num_low):
    """Low priorities under an endless stream of high ones: one in nine admissions is theirs."""
    simulation = simulate(slots=1, max_in_flight=1, policy=policy)
    for request_id in range(num_low):
        simulation.add(add_message(request_id, [1] * 9, max_tokens=1, priority=-1))
    admitted = []
    for request_id in range(100, 100 + 9 * num_low + 1):
        simulation.add(add_message(request_id, [2], max_tokens=1))
        simulation.plan()
        admitted += [each.key.request_id for each in simulation.scheduler.running_sequences()]
        simulation.answer()
    assert [admitted.index(each) + 1 for each in range(num_low)] == [
        (MAX_PASSES + 1) * (older + 1) for older in range(num_low)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [ThroughputPolicy(budget=24), LatencyPolicy(budget=16)])
def test_no_arrivals_and_preemptions_break_the_bound(policy, monkeypatch):
    preemptions = waits = longest = 0
    for seed in range(8):
        rng = random.Random(seed)
        simulation = simulate(
            num_blocks=rng.randint(8, 24), block_size=2, slots=rng.randint(1, 6), policy=policy
        )
        scheduler = simulation.scheduler
        watch = Watch(scheduler, monkeypatch)
        for request_id in range(120):
            # Mostly short and urgent; now and then one that is long, patient, or both.
            length = rng.choice([1, 2, 3, 4, 14])
            priority = rng.choice([0, 3, 3, 9])
            message = add_message(
                request_id,
                [rng.randrange(37) for _ in range(length)],
                max_tokens=rng.choice([1, 2, 6, 20]),
                priority=priority,
                seed=request_id,
            )
            try:
                simulation.add(message)
            except RequestError:  # the queue is full, or it is longer than the pool
                continue
            if rng.random() < 0.1:
                simulation.abort(rng.randrange(request_id + 1), -1)
                watch.forget_ended()
            for _ in range(rng.randint(0, 2)):
                simulation.plan()
                simulation.answer()
        simulation.run()
        simulation.check_outputs()
        assert watch.waits == {}
        preemptions += scheduler.counters.preemptions
        waits += watch.num_waits
        longest = max(longest, watch.longest_wait)
    assert preemptions > 50
    assert waits > 500
    assert longest > 40


@pytest.mark.parametrize("policy", [ThroughputPolicy(budget=16), LatencyPolicy(budget=16)])
def test_a_running_prompt_of_low_priority_is_computed_whatever_arrives(policy):
    simulation = simulate(num_blocks=64, slots=4, policy=policy, max_in_flight=1)
    simulation.add(add_message(0, list(range(37)), max_tokens=1, priority=-1))
    simulation.plan()
    simulation.answer()
    for request_id in range(1, 60):
        # Each of these could take all that a step has for prompts.
        prompt = [(request_id + i) % 37 for i in range(16)]
        simulation.add(add_message(request_id, prompt, max_tokens=1))
        simulation.plan()
        simulation.answer()
        if simulation.received(0).reason:
            break
    assert simulation.received(0).reason == FinishReason.LENGTH
    assert request_id <= MAX_PASSES + 4
    simulation.run()
    simulation.check_outputs()


def test_a_long_output_of_low_priority_ends_though_blocks_go_to_others_first():
    simulation = simulate(num_blocks=10, block_size=2, slots=4, policy=ThroughputPolicy(budget=32))
    simulation.add(add_message(0, [1, 2], max_tokens=16, priority=-1))
    for request_id in range(1, 400):
        prompt = [request_id % 37, 5, 6]
        if simulation.scheduler.waiting_requests < 4:
            simulation.add(add_message(request_id, prompt, max_tokens=12, seed=request_id))
        simulation.plan()
        simulation.answer()
        if simulation.received(0).reason:
            break
    assert simulation.received(0).reason == FinishReason.LENGTH
    assert simulation.scheduler.counters.preemptions > 0
    simulation.run()
    simulation.check_outputs()


def test_nobody_overtakes_a_sequence_that_waits_for_blocks():
    """Not even the shortest, in steps in which a running prompt takes the share of the first."""
    simulation = simulate(
        num_blocks=16, block_size=4, slots=8, policy=LatencyPolicy(budget=8), max_in_flight=1
    )
    simulation.add(add_message(0, list(range(40)), max_tokens=9))
    simulation.plan()
    simulation.answer()
    simulation.add(add_message(1, [7] * 22, max_tokens=1))  # 6 blocks; 6 are free, 1 is kept
    simulation.plan()
    simulation.answer()
    simulation.add(add_message(2, [9], max_tokens=1))
    simulation.run()
    joins = [len(join.token_ids) // 4 for plan in simulation.plans for join in plan.joins]
    assert joins == [40, 22, 1]
    simulation.check_outputs()

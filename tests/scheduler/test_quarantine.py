"""State of the block manager, corrupted on purpose in the middle of a run, against the oracle."""

import random
from array import array

import pytest

from protocol.errors import ErrorCode
from protocol.messages import FinishReason
from scheduler import step_cost
from scheduler.policy import LatencyPolicy, ThroughputPolicy
from tests.scheduler.simulation import add_message, simulate

A_STEP_S = 0.001
FAMILIES = [[(7 * i + 11 * family) % 37 for i in range(24)] for family in range(3)]


def held(manager):
    return [block for block, count in enumerate(manager._references) if count > 0]


def registered(manager):
    return [block for block, content in enumerate(manager._content) if content is not None]


def one_reference_more(manager, rng):
    manager._references[rng.randrange(manager.num_blocks)] += 1


def one_reference_less(manager, rng):
    manager._references[rng.randrange(manager.num_blocks)] -= 1


def one_reference_less_of_a_shared_block(manager, rng):
    block = rng.choice([b for b in held(manager) if manager._references[b] > 1])
    manager._references[block] -= 1


def held_and_listed_as_free(manager, rng):
    manager._free.append(rng.choice(held(manager)))


def held_and_listed_as_cached(manager, rng):
    block = rng.choice(held(manager))
    manager._cached[block] = None
    manager._cached.move_to_end(block, last=False)  # the next to be evicted


def listed_twice(manager, rng):
    manager._free.append(rng.choice([*manager._free, *manager._cached]))


def lost_from_the_list_of_free_blocks(manager, rng):
    manager._free.remove(rng.choice(manager._free))


def lost_from_the_list_of_cached_blocks(manager, rng):
    del manager._cached[rng.choice(list(manager._cached))]


def another_block_in_the_index(manager, rng):
    manager._index[rng.choice(list(manager._index))] = rng.randrange(manager.num_blocks)


def gone_from_the_index(manager, rng):
    del manager._index[rng.choice(list(manager._index))]


def other_tokens(manager, rng):
    block = rng.choice(registered(manager))
    content = manager._content[block]
    tokens = array("i", content.tokens)
    tokens[0] += 1
    manager._content[block] = content._replace(tokens=tokens.tobytes())


def another_blocks_content(manager, rng):
    block, other = rng.choice(registered(manager)), rng.choice(registered(manager))
    manager._content[block] = manager._content[other]


def content_gone(manager, rng):
    manager._content[rng.choice(registered(manager))] = None


def released_once_too_often(manager, rng):
    # Registered, so that nobody who holds it writes into it: see docs/scheduling.md.
    manager.release([rng.choice([b for b in held(manager) if manager._content[b]])])


FAULTS = [
    one_reference_more,
    one_reference_less,
    one_reference_less_of_a_shared_block,
    held_and_listed_as_free,
    held_and_listed_as_cached,
    listed_twice,
    lost_from_the_list_of_free_blocks,
    lost_from_the_list_of_cached_blocks,
    another_block_in_the_index,
    gone_from_the_index,
    other_tokens,
    another_blocks_content,
    content_gone,
    released_once_too_often,
]


def check_invariants(scheduler):
    # Content that a quarantine has made the index forget may be registered again in another block;
    # whoever has it already keeps a copy, which wastes room and harms nobody.
    problems = [problem for problem in scheduler.audit() if " is a copy of block " not in problem]
    assert problems == []


def adds_up(scheduler):
    """Whether free, held and quarantined blocks are all there are, by the tables."""
    manager = scheduler.block_manager
    in_tables = {block for each in scheduler.running_sequences() for block in each.block_table}
    held = len(in_tables - set(manager._quarantined))
    return manager.num_free + held + manager.num_quarantined == manager.num_blocks


def sees_the_same(scheduler):
    """Whether the fast look says what the thorough one does."""
    running = scheduler.running_sequences()
    holdings = [scheduler._self_check._holding(each, "request") for each in running]
    manager = scheduler.block_manager
    assert manager.is_sound(holdings) is not bool(manager.find(holdings))


class Load:
    """Requests that share prefixes, some of several samples, preempted, moved to the host, aborted
    or behind a reset."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.simulation = simulate(
            num_blocks=self.rng.randint(8, 20),
            block_size=self.rng.choice([2, 4]),
            slots=5,
            max_model_len=32,
            policy=self.rng.choice([ThroughputPolicy(budget=16), LatencyPolicy(budget=8)]),
            max_in_flight=self.rng.choice([1, 2]),
            max_waiting_requests=1000,
            max_waiting_tokens=100_000,
            host_blocks=self.rng.choice([0, 30]),
        )
        self.num_requests = 0

    def add(self):
        rng = self.rng
        family, shared = rng.choice(FAMILIES), rng.randrange(14)
        own = [rng.randrange(37) for _ in range(rng.randint(1, 4))]
        prompt = (family[:shared] + own)[: self.longest - 1]
        max_tokens = rng.randint(1, 12)
        for sample in range(rng.choice([1, 1, 1, 3])):
            seed = rng.randrange(4)
            message = add_message(
                self.num_requests, prompt, max_tokens=max_tokens, seed=seed, sample=sample
            )
            self.simulation.add(message)
        self.num_requests += 1

    @property
    def longest(self):
        facts = self.simulation.facts
        return min(facts.max_model_len, facts.num_blocks * facts.block_size)

    def steps(self, count):
        for _ in range(count):
            match self.rng.randrange(12):
                case 0 | 1 | 2 | 3:
                    self.add()
                case 4 if self.num_requests:
                    self.simulation.abort(self.rng.randrange(self.num_requests), -1)
                case 5 if self.rng.random() < 0.2:
                    self.simulation.reset_prefix_cache()
            self.simulation.plan()
            if self.rng.random() < 0.7:
                self.simulation.answer(A_STEP_S)

    def corrupt(self, fault):
        """Corrupt once, if there is something to do it to."""
        try:
            fault(self.simulation.scheduler.block_manager, self.rng)
        except IndexError:
            return False
        self.simulation.is_corrupted = True
        return True

    def reasons(self):
        received = self.simulation.frontends[0].sequences.values()
        return [each.reason for each in received if not each.is_aborted]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_corrupted_block_harms_nobody_unnoticed(fault, monkeypatch):
    monkeypatch.setattr(step_cost, "ENOUGH", 1)
    num_corrupted = num_found = num_ended = num_internal = num_moved = 0
    for seed in range(12):
        load = Load(seed)
        simulation, scheduler = load.simulation, load.simulation.scheduler
        for _ in range(4):
            load.steps(load.rng.randint(4, 20))
            known = len(simulation.problems)
            num_corrupted += load.corrupt(fault)
            sees_the_same(scheduler)
            load.steps(load.rng.randint(0, 20))
            simulation.check()
            num_found += len(simulation.problems) > known
            check_invariants(scheduler)
            assert adds_up(scheduler)
        simulation.run()
        simulation.check()
        simulation.check_outputs()
        check_invariants(scheduler)
        assert scheduler.num_free_blocks == simulation.facts.num_blocks
        reasons = load.reasons()
        assert set(reasons) <= {FinishReason.STOP, FinishReason.LENGTH, ErrorCode.INTERNAL}
        num_ended += len(reasons)
        num_internal += reasons.count(ErrorCode.INTERNAL)
        num_moved += scheduler.counters.swapped_in
        assert scheduler.swap_space.num_free == simulation.facts.host_blocks
    assert num_moved > 0
    assert num_corrupted > 5
    assert num_found > num_corrupted / 3
    assert num_internal < num_ended / 10

import numpy as np
import pytest

from benchmarks.simulation.card import Card
from benchmarks.simulation.fleet import (
    ROUTERS,
    LeastLoaded,
    PrefixAffinity,
    RoundRobin,
    simulate,
)
from benchmarks.simulation.replica import Replica
from benchmarks.simulation.trace import Shape, TraceRequest, synthesize
from scheduler.policy import LatencyPolicy
from scheduler.step_cost import StepCost

ANY = TraceRequest(0.0, 10, 10)


def grouped(number):
    return TraceRequest(0.0, 10, 10, number, 5)


def test_round_robin_goes_round():
    router = RoundRobin()
    live = np.array([9, 0, 0])
    assert [router.choose(ANY, live) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_looks_at_the_load():
    assert LeastLoaded().choose(ANY, np.array([3, 1, 2, 1])) == 1


def test_a_group_stays_on_its_replica_while_that_is_within_the_bound():
    router = PrefixAffinity(8)
    live = np.zeros(8, np.int64)
    own = router.choose(grouped(1), live)
    assert {router.choose(grouped(1), live) for _ in range(20)} == {own}
    live[:] = 4
    assert router.choose(grouped(1), live) == own
    live[own] = 6
    assert router.choose(grouped(1), live) != own


def test_no_replica_gets_more_than_the_bound():
    router = PrefixAffinity(8)
    live = np.zeros(8, np.int64)
    for _ in range(800):
        live[router.choose(grouped(1), live)] += 1
    assert live.sum() == 800
    assert live.max() == 125  # 1.25 times the mean


@pytest.mark.parametrize("name", ROUTERS)
def test_a_fleet_answers_every_request(name):
    trace = synthesize(200, 100.0, Shape(prompt_median=50, output_median=10, num_groups=6))
    cost = Card(StepCost(0.01, 1e-4, 1e-6, 1e-7), hop_s=1e-3, cache_tokens=64_000)
    replicas = [
        Replica(cost, LatencyPolicy(), max_num_seqs=8, max_model_len=4_096, prefix_cache=True)
        for _ in range(4)
    ]
    outcome = simulate(trace, replicas, ROUTERS[name](4))
    assert outcome.finished == 200
    assert outcome.output_tokens == sum(each.num_output_tokens for each in trace)
    assert sum(each.outcome.finished > 0 for each in replicas) == 4
    assert [each.num_live for each in replicas] == [0] * 4


def test_affinity_finds_more_prefixes_than_round_robin():
    trace = synthesize(400, 100.0, Shape(prompt_median=50, output_median=10, num_groups=40))
    cost = Card(StepCost(0.001, 1e-5, 1e-7, 1e-8), hop_s=1e-4, cache_tokens=64_000)
    cached = {}
    for name in ("round-robin", "prefix-affinity"):
        replicas = [
            Replica(cost, LatencyPolicy(), max_num_seqs=64, max_model_len=4_096, prefix_cache=True)
            for _ in range(8)
        ]
        cached[name] = simulate(trace, replicas, ROUTERS[name](8)).cached_tokens
    assert cached["prefix-affinity"] > 1.3 * cached["round-robin"]

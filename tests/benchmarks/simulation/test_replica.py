import pytest

from benchmarks.simulation.card import Card
from benchmarks.simulation.fleet import RoundRobin, simulate
from benchmarks.simulation.replica import NEVER, Replica, prompt_ids
from benchmarks.simulation.trace import Shape, TraceRequest, synthesize
from scheduler.policy import LatencyPolicy, ThroughputPolicy
from scheduler.step_cost import StepCost, StepWork, chunk_pairs

A_SECOND_A_STEP = Card(StepCost(1.0, 0.0, 0.0, 0.0), hop_s=0.0, cache_tokens=64_000)
A_SECOND_A_TOKEN = Card(StepCost(0.0, 1.0, 0.0, 0.0), hop_s=0.0, cache_tokens=64_000)


def replica(cost, policy=None, *, prefix_cache=False, max_num_seqs=8):
    return Replica(
        cost,
        policy or LatencyPolicy(),
        max_num_seqs=max_num_seqs,
        max_model_len=4_096,
        prefix_cache=prefix_cache,
    )


def answer(trace, one):
    return simulate(trace, [one], RoundRobin())


def test_one_request_takes_a_step_a_token():
    outcome = answer([TraceRequest(5.0, 100, 4)], replica(A_SECOND_A_STEP))
    assert (outcome.finished, outcome.output_tokens, outcome.steps) == (1, 4, 4)
    assert (outcome.first_token.largest, outcome.gap.largest) == (1.0, 1.0)
    assert (outcome.first_token.count, outcome.gap.count) == (1, 3)
    assert outcome.end_s == 9.0


def test_a_prompt_that_comes_meanwhile_lengthens_a_step_by_its_chunk():
    trace = [TraceRequest(0.0, 10, 5), TraceRequest(10.5, 20, 1)]
    one = replica(A_SECOND_A_TOKEN, LatencyPolicy(8))
    outcome = answer(trace, one)
    # The first prompt takes steps of 8 and 2. The second comes when both plans of the rows behind
    # it are under way; its 20 tokens then fill the steps up to 8: three steps.
    assert one.totals.tolist()[1] == 10 + 4 + 20
    assert outcome.gap.largest == 8.0


def test_plans_under_way_hide_the_hops():
    cost = Card(StepCost(1.0, 0.0, 0.0, 0.0), hop_s=0.25, cache_tokens=64_000)
    outcome = answer([TraceRequest(0.0, 10, 9)], replica(cost))
    assert outcome.first_token.largest == 1.5
    assert outcome.gap.largest == 1.0


def test_what_a_step_computes_is_what_its_rows_attend_to():
    one = replica(A_SECOND_A_STEP)
    answer([TraceRequest(0.0, 10, 3)], one)
    # Pairs of the prompt: 1 + 2 + … + 10. Read by the two decode rows: 11, then 12 positions.
    assert one.totals.tolist() == [3, 12, 23, 55]


def test_a_group_computes_what_it_shares_once():
    trace = [TraceRequest(float(10 * number), 300, 1, 1, 256) for number in range(3)]
    outcome = answer(trace, replica(A_SECOND_A_STEP, prefix_cache=True))
    assert outcome.cached_tokens == 2 * 256
    assert answer(trace, replica(A_SECOND_A_STEP)).cached_tokens == 0


def test_prompts_are_as_long_and_as_equal_as_the_trace_says():
    one, two = (prompt_ids(TraceRequest(0, 100, 1, 7, 64), number) for number in (1, 200_001))
    assert (len(one), len(two)) == (400, 400)
    assert one[:256] == two[:256]
    assert one[256:268] != two[256:268]


@pytest.mark.parametrize("policy", [LatencyPolicy(64), ThroughputPolicy(256)])
def test_every_request_of_a_trace_ends_with_all_its_tokens(policy):
    trace = synthesize(300, 2.0, Shape(prompt_median=60, output_median=12, longest=400))
    # So little cache that sequences have to give way.
    cost = Card(StepCost(0.01, 1e-4, 1e-6, 1e-7), hop_s=1e-3, cache_tokens=1_600)
    one = replica(cost, policy)
    outcome = answer(trace, one)
    assert outcome.finished == 300
    assert outcome.output_tokens == sum(each.num_output_tokens for each in trace)
    assert outcome.first_token.count == 300
    assert (one.num_live, one.next_event()) == (0, NEVER)
    one.scheduler.check_invariants()


@pytest.mark.parametrize(
    ("card", "target_s"),
    [("nvidia-h200-qwen3-0.6b", 0.003), ("nvidia-h200-qwen3-8b", 0.02)],
)
def test_a_streams_gap_stays_at_the_target_whatever_arrives(card, target_s):
    stream = TraceRequest(0.0, 100, 2_000)
    prompts = [TraceRequest(0.5 + target_s * number, 2_000, 1) for number in range(600)]
    one = replica(Card.load(card), LatencyPolicy(itl_target_s=target_s), max_num_seqs=256)
    outcome = answer([stream, *prompts], one)
    assert outcome.finished == 601
    assert outcome.gap.largest <= target_s * 1.02


def test_a_short_prompt_starts_within_three_steps_behind_a_long_one():
    card = Card.load("nvidia-h200-qwen3-0.6b")
    one = Replica(card, LatencyPolicy(), max_num_seqs=8, max_model_len=110_000, prefix_cache=False)
    outcome = answer([TraceRequest(0.0, 100_000, 1), TraceRequest(1.0, 20, 1)], one)
    # The two steps under way and its own, of which none is dearer than the long one's last.
    longest_step = card.cost.seconds(StepWork(2_048, 0, chunk_pairs(98_000, 2_048)))
    assert outcome.first_token.largest > 2.0
    assert outcome.first_token.percentile(50) <= 3 * longest_step + 2 * card.hop_s

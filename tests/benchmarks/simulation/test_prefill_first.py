from benchmarks.simulation.card import Card
from benchmarks.simulation.prefill_first import prefill_first
from benchmarks.simulation.trace import TraceRequest
from scheduler.step_cost import StepCost

A_SECOND_A_TOKEN = Card(StepCost(0.0, 1.0, 0.0, 0.0), hop_s=0.0, cache_tokens=64_000)


def test_a_stream_stands_still_while_prompts_come():
    trace = [TraceRequest(0.0, 10, 3), TraceRequest(1.0, 20, 1), TraceRequest(25.0, 30, 1)]
    outcome = prefill_first(trace, A_SECOND_A_TOKEN, max_num_seqs=8)
    # Its first token comes at 10; prompts of 20 and 30 tokens follow before its second.
    assert outcome.gap.largest == 51.0
    assert (outcome.finished, outcome.output_tokens) == (3, 5)
    assert outcome.end_s == 62.0


def test_no_more_run_than_may():
    trace = [TraceRequest(0.0, 1, 2)] * 3
    outcome = prefill_first(trace, A_SECOND_A_TOKEN, max_num_seqs=2)
    # Two prompts, two rows, then the third's prompt and row.
    assert (outcome.steps, outcome.end_s) == (4, 6.0)
    assert outcome.first_token.largest == 5.0

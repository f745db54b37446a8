from scheduler.stats import STATS_INTERVAL_S, Counters, StatsLine


def test_a_line_comes_once_an_interval_and_tells_what_is_new():
    counters = Counters(prefill_tokens=1000, output_tokens=50, steps=20, finished=2)
    line = StatsLine(100.0)
    assert line.due(100.0 + STATS_INTERVAL_S - 0.1, counters) is None
    assert line.due(110.0, counters) == (
        "prefill_tps=100 decode_tps=5 cached=0 steps=20 step_ms=500.0 finished=2 preempted=0"
    )
    counters.output_tokens += 100
    counters.steps += 10
    counters.preemptions += 1
    assert line.due(115.0, counters) is None
    assert line.due(120.0, counters) == (
        "prefill_tps=0 decode_tps=10 cached=0 steps=10 step_ms=1000.0 finished=0 preempted=1"
    )


def test_nothing_is_said_while_nothing_happens():
    line = StatsLine(0.0)
    assert line.due(10.0, Counters()) is None
    assert line.due(20.0, Counters()) is None

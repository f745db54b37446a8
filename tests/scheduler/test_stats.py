from scheduler.stats import STATS_INTERVAL_S, Counters, StatsLine


def test_a_line_comes_once_an_interval_and_tells_what_is_new():
    counters = Counters(
        prefill_tokens=1000,
        output_tokens=50,
        steps=20,
        finished=2,
        lookup_tokens=300,
        cached_tokens=120,
        resumed_lookup_tokens=80,
        resumed_cached_tokens=64,
        shared_blocks=3,
        revived_blocks=4,
        evicted_blocks=5,
    )
    line = StatsLine(100.0)
    assert line.due(100.0, counters, is_computing=True) is None
    assert line.due(100.0 + STATS_INTERVAL_S - 0.1, counters, is_computing=True) is None
    assert line.due(110.0, counters, is_computing=True) == (
        "prefill_tps=100 decode_tps=5 looked_up=300 cached=120 resumed_cached=64 shared=3 "
        "revived=4 evicted=5 steps=20 step_ms=500.0 finished=2 preempted=0 swapped=0/0"
    )
    counters.output_tokens += 100
    counters.steps += 10
    counters.preemptions += 1
    counters.swapped_out += 3
    counters.swapped_in += 2
    assert line.due(115.0, counters, is_computing=True) is None
    assert line.due(120.0, counters, is_computing=False) == (
        "prefill_tps=0 decode_tps=10 looked_up=0 cached=0 resumed_cached=0 shared=0 "
        "revived=0 evicted=0 steps=10 step_ms=1000.0 finished=0 preempted=1 swapped=3/2"
    )


def test_idle_time_is_no_step_time():
    counters = Counters()
    line = StatsLine(0.0)
    assert line.due(6.0, counters, is_computing=True) is None  # two steps, from here …
    counters.steps = 1
    assert line.due(6.25, counters, is_computing=True) is None
    counters.steps = 2
    assert line.due(6.75, counters, is_computing=False) is None  # … to here
    assert "steps=2 step_ms=375.0 " in line.due(10.0, counters, is_computing=False)


def test_nothing_is_said_while_nothing_happens():
    line = StatsLine(0.0)
    assert line.due(10.0, Counters(), is_computing=False) is None
    assert line.due(20.0, Counters(), is_computing=False) is None

from protocol.running_clock import RunningClock


def test_it_counts_like_any_clock_while_it_is_read_often():
    clock = RunningClock(100.0, longest_pause_s=2.0)
    assert [clock.read(now) for now in (100.0, 101.5, 103.5)] == [0.0, 1.5, 3.5]


def test_of_a_long_pause_only_so_much_counts():
    clock = RunningClock(100.0, longest_pause_s=2.0)
    assert clock.read(1000.0) == 2.0
    assert clock.read(1000.5) == 2.5

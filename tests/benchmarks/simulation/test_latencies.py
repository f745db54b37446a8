import numpy as np
import pytest

from benchmarks.simulation.latencies import Latencies


def test_percentiles_are_right_to_a_percent_and_the_largest_is_exact():
    latencies = Latencies()
    latencies.add(np.arange(1, 1_001) / 1_000)
    for percent in (1, 50, 90, 99):
        assert latencies.percentile(percent) == pytest.approx(percent / 100, rel=0.0101)
    assert latencies.percentile(100) == latencies.largest == 1.0


def test_nothing_has_no_latency():
    latencies = Latencies()
    latencies.add(np.empty(0))
    assert (latencies.count, latencies.percentile(50), latencies.largest) == (0, 0.0, 0.0)


def test_what_is_outside_the_bins_is_counted():
    latencies = Latencies()
    latencies.add(np.array([0.0, 1e6]))
    assert latencies.count == 2
    assert latencies.percentile(50) == pytest.approx(1e-6, rel=0.0101)
    assert latencies.largest == 1e6


def test_merged_counts_are_those_of_all_values():
    one, other, both = Latencies(), Latencies(), Latencies()
    one.add(np.array([0.1, 0.2]))
    other.add(np.array([0.3]))
    both.add(np.array([0.1, 0.2, 0.3]))
    one.merge(other)
    assert one.count == 3
    assert [one.percentile(p) for p in (1, 50, 99)] == [both.percentile(p) for p in (1, 50, 99)]

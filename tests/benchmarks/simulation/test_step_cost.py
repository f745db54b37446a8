import numpy as np
import pytest

from benchmarks.simulation.step_cost import COSTS, StepCost, StepWork, fit


def test_a_step_costs_the_sum_of_its_terms():
    cost = StepCost(step_s=1.0, token_s=0.5, read_s=0.25, pair_s=0.125, hop_s=9.0, cache_tokens=64)
    assert cost.seconds(StepWork(num_tokens=3, num_read=2, num_pairs=8)) == 1 + 1.5 + 0.5 + 1


def test_the_fit_finds_the_costs_that_made_the_times():
    totals = np.array([[10, 5, 0], [10, 50, 3], [2, 900, 70], [40, 40, 0]], float)
    assert fit(totals, totals @ [0.25, 0.5, 2.0]) == pytest.approx([0.25, 0.5, 2.0])


def test_a_term_that_would_be_negative_is_left_out():
    totals = np.array([[1, 1], [1, 2], [1, 4]], float)
    seconds = np.array([3.0, 2.9, 2.7])
    step, token = fit(totals, seconds)
    assert token == 0
    assert step == pytest.approx((1 / seconds).sum() / (1 / seconds**2).sum())


@pytest.mark.parametrize("path", sorted(COSTS.glob("*.json")), ids=lambda path: path.stem)
def test_kept_fits_have_positive_costs(path):
    cost = StepCost.load(path.stem)
    assert min(cost.as_dict().values()) > 0

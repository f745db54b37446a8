from dataclasses import astuple

import numpy as np
import pytest

from scheduler.step_cost import (
    ENOUGH,
    WINDOW,
    StepCost,
    StepCostModel,
    StepWork,
    chunk_pairs,
    fit,
)


def test_a_step_costs_the_sum_of_its_terms():
    cost = StepCost(step_s=1.0, token_s=0.5, read_s=0.25, pair_s=0.125)
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


H200 = StepCost(step_s=0.83e-3, token_s=1.6e-6, read_s=31.5e-9, pair_s=0.55e-9)


@pytest.mark.parametrize(
    ("cost", "seconds", "start"),
    [
        (H200, 0.01, 0),
        (H200, 0.01, 100_000),
        (H200, 1e-9, 0),
        (StepCost(1.0, 0.5, 0.0, 0.0), 7.2, 9),
        (StepCost(0.0, 0.0, 0.0, 0.25), 7.2, 0),
        (H200, 0.0, 0),
        (H200, -1.0, 0),
    ],
)
def test_the_most_tokens_that_fit_are_taken(cost, seconds, start):
    def price(count):
        return cost.token_s * count + cost.pair_s * chunk_pairs(start, count)

    count = cost.tokens_within(seconds, start)
    assert price(count) <= max(seconds, 0.0)
    assert price(count + 1) > seconds


def test_what_costs_nothing_fits_without_end():
    assert StepCost(1.0, 0.0, 1.0, 0.0).tokens_within(0.1, 5) == 2**31


def mixed_work(number):
    count = 100 + 37 * (number % 29)
    return StepWork(8 + count, 500 * (number % 7), chunk_pairs(64 * (number % 11), count))


def test_the_model_learns_what_steps_cost():
    model = StepCostModel()
    for number in range(3 * WINDOW):
        for work in (mixed_work(number), StepWork(8 + number % 5, 900 + 100 * number, 0)):
            model.observe(work, H200.seconds(work))
    assert astuple(model.current()) == pytest.approx(astuple(H200), rel=0.01)


def test_nothing_is_predicted_from_too_few_steps_or_from_decoding_alone():
    model = StepCostModel()
    for number in range(WINDOW):
        model.observe(StepWork(number, 900, 0), 0.001)
    for number in range(ENOUGH - 1):
        model.observe(mixed_work(number), 0.002)
    assert model.current() is None
    model.observe(mixed_work(0), 0.0)  # not timed
    assert model.current() is None
    model.observe(mixed_work(0), 0.002)
    assert model.current() is not None


def test_a_long_time_of_decoding_does_not_make_it_forget_prompts():
    model = StepCostModel()
    for number in range(WINDOW):
        model.observe(mixed_work(number), H200.seconds(mixed_work(number)))
    for number in range(10_000):
        work = StepWork(8, 900 + number % 64, 0)
        model.observe(work, H200.seconds(work))
    long = StepWork(1_000, 0, chunk_pairs(0, 1_000))
    assert model.current().seconds(long) == pytest.approx(H200.seconds(long), rel=1e-3)


def test_one_step_that_was_held_up_says_little():
    model = StepCostModel()
    for number in range(WINDOW):
        late = 5.0 if number == 40 else 0.0
        model.observe(mixed_work(number), H200.seconds(mixed_work(number)) + late)
    work = mixed_work(3)
    assert model.current().seconds(work) == pytest.approx(H200.seconds(work), rel=0.02)


def test_it_follows_a_card_that_gets_slower():
    model = StepCostModel()
    for factor in (1.0, 2.0):
        for number in range(2 * WINDOW):
            model.observe(mixed_work(number), factor * H200.seconds(mixed_work(number)))
    work = mixed_work(5)
    assert model.current().seconds(work) == pytest.approx(2 * H200.seconds(work), rel=1e-3)


def test_what_steps_of_one_size_cannot_tell_stays_as_it_was():
    model = StepCostModel()
    for number in range(2 * WINDOW):
        model.observe(mixed_work(number), H200.seconds(mixed_work(number)))
    known = model.current()
    same = StepWork(40, 0, chunk_pairs(0, 32))
    for _ in range(2 * WINDOW):
        model.observe(same, H200.seconds(same))
    assert model.current().seconds(same) == pytest.approx(H200.seconds(same), rel=1e-3)
    assert model.current().token_s == pytest.approx(known.token_s, rel=0.2)


def test_at_first_tokens_are_what_costs():
    model = StepCostModel()
    for _ in range(ENOUGH):
        model.observe(StepWork(4, 0, 1), 0.008)
    assert model.current().token_s == pytest.approx(0.002, rel=0.3)


def test_steps_are_trusted_up_to_twice_the_largest_seen():
    model = StepCostModel()
    assert model.trusted_tokens == 0
    for count in (40, 300, 20):
        model.observe(StepWork(8 + count, 0, chunk_pairs(0, count)), 0.01)
    assert (model.trusted_tokens, model.trusted_pairs) == (2 * 308, 2 * 45_150)
    model.observe(StepWork(5_000, 9_000, 0), 0.01)  # decode rows say nothing of chunks
    assert (model.trusted_tokens, model.trusted_pairs) == (2 * 308, 2 * 45_150)


@pytest.mark.parametrize(
    ("work", "factor"),
    [
        (StepWork(3_000, 0, chunk_pairs(0, 3_000)), 2.0),  # larger than any before
        (StepWork(120, 0, chunk_pairs(0, 120)), 1.5),  # much slower than it should be
    ],
)
def test_a_surprise_is_learned_from_at_once(work, factor):
    model = StepCostModel()
    for number in range(2 * ENOUGH):
        model.observe(mixed_work(number), H200.seconds(mixed_work(number)))
    before = model.current().seconds(work)
    model.observe(work, factor * H200.seconds(work))
    assert model.current().seconds(work) > before
    after = model.current()
    model.observe(mixed_work(5), H200.seconds(mixed_work(5)))  # as expected: no news
    assert model.current() is after

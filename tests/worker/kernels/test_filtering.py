from dataclasses import replace

import pytest
import torch

from tests.worker.kernels.closeness import DTYPES
from tests.worker.kernels.draws import check, make_rows
from worker.kernels.filtering import filter_threshold

NAN, INF = float("nan"), float("inf")
VOCAB = 3001


def thresholds(rows, device):
    columns = (rows.logits, rows.temperatures, rows.top_k, rows.top_p, rows.min_p)
    return filter_threshold(*(column.to(device) for column in columns)).cpu()


def exact_threshold(logits, temperature, top_k, top_p, min_p):
    """One row's, by a sort in float64."""
    scaled = (logits.float() / temperature).double().sort(descending=True).values
    least = scaled[min(top_k, len(scaled)) - 1]
    kept = scaled[scaled >= least]
    before = kept.softmax(0).cumsum(0) - kept.softmax(0)
    if top_p < 1:
        least = torch.maximum(least, kept[max(int((before < top_p).sum()), 1) - 1])
    elif top_k >= len(scaled):
        least = torch.tensor(-INF)
    return torch.maximum(least, scaled[0] + torch.tensor(min_p).double().log()).float()


def with_filters(rows, *, top_k=0, top_p=1.0, min_p=0.0):
    vocab_size = rows.logits.shape[1]
    return replace(
        rows,
        top_k=torch.full_like(rows.top_k, top_k or vocab_size),
        top_p=torch.full_like(rows.top_p, top_p),
        min_p=torch.full_like(rows.min_p, min_p),
    )


FILTERS = [
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 2000},
    {"top_p": 0.1},
    {"top_p": 0.95},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.99, "min_p": 0.02},
    {"top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_threshold_is_the_sorts(filters, dtype, device):
    rows = with_filters(make_rows(4, VOCAB, dtype), **filters).take([0, 3])
    result = thresholds(rows, device)
    top_k, top_p, min_p = (float(column[0]) for column in (rows.top_k, rows.top_p, rows.min_p))
    expected = exact_threshold(rows.logits[0], rows.temperatures[0], int(top_k), top_p, min_p)
    torch.testing.assert_close(result[0], expected, rtol=1e-6, atol=0)
    assert result[1] == -INF, "a greedy row"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_tokens_as_the_sampler(dtype, device):
    rows = make_rows(len(FILTERS) + 2, VOCAB, dtype)
    for row, filters in enumerate(FILTERS):
        rows.top_k[row] = filters.get("top_k", VOCAB)
        rows.top_p[row] = filters.get("top_p", 1.0)
        rows.min_p[row] = filters.get("min_p", 0.0)
    rows = replace(rows, temperatures=torch.full((len(FILTERS) + 2,), 0.9))
    check(rows, device, filtered=True)


def test_rows_without_filters_draw_as_if_no_row_had_any(device):
    rows = make_rows(9, VOCAB)
    free = rows.drawn(device, filtered=False)[1]
    rows.top_k[4] = 1
    together = rows.drawn(device, filtered=True)[1]
    others = torch.arange(9) != 4
    assert torch.equal(together[others], free[others])
    assert together[4] == rows.logits[4].argmax()


def test_a_row_does_not_depend_on_its_neighbours(device):
    rows = with_filters(make_rows(6, VOCAB), top_k=40, top_p=0.9)
    together = thresholds(rows, device)
    for index in (slice(0, 1), slice(3, 6)):
        assert torch.equal(thresholds(rows.take(index), device), together[index])


def test_a_large_vocabulary(device):
    rows = with_filters(make_rows(1, 262_144, torch.float16), top_k=64, top_p=0.95)
    expected = exact_threshold(rows.logits[0], rows.temperatures[0], 64, 0.95, 0.0)
    torch.testing.assert_close(thresholds(rows, device)[0], expected, rtol=1e-6, atol=0)


def test_more_than_is_gathered(device):
    # Flat: the nucleus is most of the vocabulary.
    rows = with_filters(make_rows(1, 20_000, spread=0.1), top_p=0.9)
    expected = exact_threshold(rows.logits[0], rows.temperatures[0], 20_000, 0.9, 0.0)
    torch.testing.assert_close(thresholds(rows, device)[0], expected, rtol=1e-3, atol=0)
    # More than there are columns.
    rows = with_filters(rows, top_k=9000)
    expected = exact_threshold(rows.logits[0], rows.temperatures[0], 9000, 1.0, 0.0)
    assert thresholds(rows, device)[0] == expected


def test_ties_at_the_threshold_are_all_kept(device):
    logits = torch.full((1, 6), -9.0)
    logits[:, 0], logits[:, 1:4] = 1.0, 0.5
    rows = replace(make_rows(1, 6), logits=logits, temperatures=torch.ones(1))
    for filters in ({"top_k": 2}, {"top_k": 4}, {"top_p": 0.5}):
        assert thresholds(with_filters(rows, **filters), device).tolist() == [0.5]
    rows = replace(rows, logits=torch.zeros(1, 6))
    assert thresholds(with_filters(rows, top_k=3, top_p=0.3), device).tolist() == [0.0]


def test_failed_rows_fail_alone(device):
    rows = with_filters(make_rows(5, 1203), top_k=30, top_p=0.9, min_p=0.01)
    rows.logits[1, 1100] = NAN
    rows.logits[2, 3] = INF
    rows.logits[3] = -INF
    rows.logits[4, 10:] = -INF
    rows = replace(rows, temperatures=torch.ones(5))
    assert rows.expected().failed.tolist() == [False, True, True, True, False]
    check(rows, device, filtered=True)

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from worker.philox import gumbel_noise
from worker.sampler import SamplingRows, argmax, sample, top_logprobs

VOCAB = 3000


def rows(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    vocab: int = VOCAB,
) -> SamplingRows:
    """Parameters of rows that differ only in their positions."""
    index = torch.arange(count)
    none = index[:0]
    is_filtered = bool(top_k) or top_p < 1 or min_p > 0
    return SamplingRows(
        temperatures=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k or vocab),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        seeds=torch.full((count,), 1234),
        positions=index,
        unfiltered=none if temperature == 0 or is_filtered else index,
        filtered=index if temperature > 0 and is_filtered else none,
        max_top_k=top_k,
    )


def spread_logits(count: int, *, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab, generator=generator).mul(3).expand(count, vocab).clone()


def kept_tokens(logits: Tensor, params: SamplingRows) -> set[int]:
    """Every token that can be drawn: each row's noise is made to prefer another token."""
    return set(sample(logits, params).tokens.tolist())


def test_argmax_finds_the_first_and_any_nan():
    values = torch.tensor([[1.0, 3.0, 3.0], [0.0, math.nan, 9.0]])
    assert argmax(values).tolist() == [1, 1]


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(2, 10)
    logits[0, [3, 7]] = 5.0
    assert sample(logits, rows(2, temperature=0.0, vocab=10)).tokens.tolist() == [3, 0]


def test_unfiltered_is_argmax_of_logits_plus_noise():
    logits = torch.randn(6, 50)
    params = rows(6, temperature=0.7, vocab=50)
    noise = gumbel_noise(params.seeds, params.positions, first_id=0, num_ids=50)
    expected = (logits / 0.7 + noise).argmax(dim=1)
    assert torch.equal(sample(logits, params).tokens, expected)


@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.9}], ids=str
)
def test_filtered_equals_masking_by_hand(filters):
    count = 40
    logits = torch.randn(count, VOCAB).mul(4)
    params = rows(count, temperature=0.8, **filters)
    scaled = logits / 0.8
    noise = gumbel_noise(params.seeds, params.positions, first_id=0, num_ids=VOCAB)
    expected = []
    for row in range(count):
        order = scaled[row].argsort(descending=True)
        allowed = order[: filters.get("top_k", VOCAB)]
        probabilities = scaled[row, allowed].double().softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        allowed = allowed[before < filters.get("top_p", 1.0)]
        probabilities = scaled[row].double().softmax(-1)
        least = filters.get("min_p", 0.0) * probabilities.max()
        allowed = [int(i) for i in allowed if probabilities[i] >= least]
        expected.append(max(allowed, key=lambda i: float(scaled[row, i] + noise[row, i])))
    assert sample(logits, params).tokens.tolist() == expected


def test_draws_follow_the_softmax():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    logits = probabilities.log().expand(20_000, 5)
    for params in (rows(20_000, vocab=5), rows(20_000, vocab=5, min_p=0.01)):
        share = torch.bincount(sample(logits, params).tokens, minlength=5) / 20_000
        assert (share - probabilities).abs().max() < 0.015


def test_temperature_sharpens():
    logits = torch.tensor([1.0, 0.0]).expand(20_000, 2)
    share = sample(logits, rows(20_000, temperature=0.5, vocab=2)).tokens.float().mean()
    assert abs(share - 1 / (1 + math.exp(2))) < 0.01


def test_top_k_of_one_is_greedy():
    logits = torch.randn(8, VOCAB)
    assert torch.equal(sample(logits, rows(8, top_k=1)).tokens, logits.argmax(1))


def test_tiny_top_p_is_greedy():
    logits = torch.randn(8, VOCAB)
    assert torch.equal(sample(logits, rows(8, top_p=1e-9)).tokens, logits.argmax(1))


def test_ties_at_the_threshold_are_all_kept():
    logits = torch.full((4000, 6), -9.0)
    logits[:, 0], logits[:, 1:4] = 1.0, 0.5
    assert kept_tokens(logits, rows(4000, top_k=2, vocab=6)) == {0, 1, 2, 3}


def test_filters_may_keep_more_than_the_first_candidates():
    # All equal: whatever top-k says, everything ties with the last one kept.
    drawn = kept_tokens(torch.zeros(400, VOCAB), rows(400, top_k=3))
    assert max(drawn) > 2000
    # Flat: top-p needs more than half of the vocabulary.
    drawn = kept_tokens(torch.linspace(0, 0.1, VOCAB).expand(400, VOCAB), rows(400, top_p=0.9))
    assert 200 < min(drawn) < 700


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(12, VOCAB)
    for params in (rows(12), rows(12, top_k=40, top_p=0.95)):
        together = sample(logits, params).tokens
        for row in range(12):
            one = torch.tensor([0])
            alone = replace(
                params,
                **{
                    name: getattr(params, name)[row : row + 1]
                    for name in ("temperatures", "top_k", "top_p", "min_p", "seeds", "positions")
                },
                unfiltered=one if len(params.unfiltered) else one[:0],
                filtered=one if len(params.filtered) else one[:0],
            )
            assert sample(logits[row : row + 1], alone).tokens[0] == together[row]


def test_mixed_kinds_of_rows():
    logits = torch.randn(3, VOCAB)
    greedy, free, top = rows(3, temperature=0.0), rows(3), rows(3, top_k=9)
    mixed = replace(
        free,
        temperatures=torch.tensor([0.0, 1.0, 1.0]),
        top_k=torch.tensor([VOCAB, VOCAB, 9]),
        unfiltered=torch.tensor([1]),
        filtered=torch.tensor([2]),
        max_top_k=9,
    )
    tokens = sample(logits, mixed).tokens
    assert tokens[0] == sample(logits, greedy).tokens[0]
    assert tokens[1] == sample(logits, free).tokens[1]
    assert tokens[2] == sample(logits, top).tokens[2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [rows(3, temperature=0.0), rows(3), rows(3, top_p=0.5)])
def test_a_bad_row_fails_alone(bad: float, params: SamplingRows):
    logits = torch.randn(3, VOCAB)
    good = sample(logits, params)
    logits[1, 17] = bad
    samples = sample(logits, params)
    assert samples.failed.tolist() == [False, True, False]
    assert samples.tokens[[0, 2]].tolist() == good.tokens[[0, 2]].tolist()
    assert 0 <= samples.tokens[1] < VOCAB


def test_no_possible_token_is_a_failure():
    logits = torch.full((1, 8), -math.inf)
    assert sample(logits, rows(1, vocab=8)).failed.tolist() == [True]


def test_top_logprobs():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 5.0, 1.0]])
    ids, values = top_logprobs(logits, torch.tensor([0, 2]), 2)
    assert ids.tolist() == [[0, 1, 2], [2, 2, 3]]
    torch.testing.assert_close(values, logits.log_softmax(-1).gather(1, ids))
    ids, values = top_logprobs(logits, torch.tensor([3, 3]), 0)
    assert ids.tolist() == [[3], [3]]
    torch.testing.assert_close(values, logits.log_softmax(-1)[:, 3:])

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_check import check_draw
from tests.worker.kernels.closeness import DTYPES
from tests.worker.kernels.draws import check, make_rows
from worker.kernels.drawing import draw_candidates
from worker.sampling_slots import Variant

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"),
    [*((rows, 1003) for rows in (1, 2, 7, 8, 9, 31, 33)), (1, 49_152), (9, 6001)],
)
def test_same_tokens_as_the_sampler(num_rows, vocab_size, dtype, device):
    check(make_rows(num_rows, vocab_size, dtype), device, filtered=False)


def test_indices_of_64_bits(device):
    rows = make_rows(7, 1003)
    large = replace(rows, positions=rows.positions + 2**40)
    check(large, device, filtered=False, index_dtype=torch.int64)


def test_a_row_does_not_depend_on_its_neighbours(device):
    rows = make_rows(12, 3001, torch.float16)
    together = rows.drawn(device, filtered=False)[1]
    for index in (slice(0, 1), slice(3, 8), slice(2, 12)):
        assert torch.equal(rows.take(index).drawn(device, filtered=False)[1], together[index])


def test_scores_too_close_for_rough_logarithms(device):
    # A step of float32 is an eighth here: what is left of the noise ties, and the first id wins.
    rows = make_rows(12, 3001)
    check(replace(rows, logits=torch.full((12, 3001), 1e6)), device, filtered=False)


def test_greedy_takes_the_first_of_equals(device):
    rows = make_rows(4, 3001)
    logits = torch.zeros(4, 3001)
    logits[:, [1500, 2900]] = 5.0
    rows = replace(rows, logits=logits, temperatures=torch.zeros(4))
    assert rows.drawn(device, filtered=False)[1].tolist() == [1500] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_failed_rows_fail_alone(temperature, device):
    rows = make_rows(6, 1203)
    rows.logits[1, 1100] = NAN
    rows.logits[2, 3] = INF
    rows.logits[3] = -INF
    rows.logits[4] = NAN
    rows.logits[5, :1000] = -INF
    rows = replace(rows, temperatures=torch.full((6,), temperature))
    assert rows.expected().failed.tolist() == [False, True, True, True, True, False]
    check(rows, device, filtered=False)


@pytest.mark.parametrize("first_ids", [(0, 500), (0, 401, 802), (0, 99, 1000)])
def test_ranks_find_what_one_draws(first_ids, device):
    rows = make_rows(9, 1003)
    parameters = [c.to(device) for c in (rows.temperatures, rows.seeds, rows.positions)]
    parts = []
    for first, end in zip(first_ids, (*first_ids[1:], 1003), strict=True):
        logits = rows.logits[:, first:end].to(device)
        parts.append(draw_candidates(logits, *parameters, first_id=first))
    scores = torch.stack([part.scores for part in parts])
    tokens = torch.stack([part.tokens for part in parts])
    winners = scores.argmax(0, keepdim=True)
    assert tokens.gather(0, winners)[0].tolist() == rows.expected().tokens.tolist()
    largest = torch.stack([part.largest for part in parts]).amax(0).cpu()
    assert torch.equal(largest, rows.logits.amax(-1))


@pytest.mark.slow
def test_draws_follow_the_softmax(device):
    num_draws = 20_000 if device.type == "cuda" else 200
    logits = torch.linspace(0.0, 2.0, 50).roll(13)
    rows = replace(
        make_rows(num_draws, 50),
        logits=logits.repeat(num_draws, 1),
        temperatures=torch.full((num_draws,), 1.25),
        seeds=torch.full((num_draws,), 11),
        positions=torch.arange(num_draws),
    )
    drawn = rows.drawn(device, filtered=False)[1]
    expected = (logits.double() / 1.25).softmax(0) * num_draws
    counts = torch.bincount(drawn, minlength=50)
    # 49 degrees of freedom: 1 in 1,000 lies above.
    assert ((counts - expected).square() / expected).sum() < 85.4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("variant", Variant)
@pytest.mark.parametrize("vocab_size", [151_936, 49_152, 1003])
def test_same_tokens_as_torchs_sampler_on_a_gpu(vocab_size, variant):
    outcome = check_draw(torch.device("cuda"), vocab_size, variant)
    assert outcome.is_right, outcome.detail

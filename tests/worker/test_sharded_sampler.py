"""Ranks that each have a part of the logits choose what one rank with all of them does."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor

from tests.worker.thread_ranks import ThreadRank, on_all, thread_ranks
from worker.parallel import OneRank
from worker.sampler import Samples, SamplingRows, sample
from worker.shard import divide_vocabulary
from worker.sharded_sampler import ShardedSampler

VOCAB = 101
KINDS = 3


def mixed_rows(count: int) -> SamplingRows:
    """Rows that are greedy, free and filtered in turn."""
    index = torch.arange(count)
    kind = index % KINDS
    return SamplingRows(
        temperatures=torch.where(kind == 0, 0.0, 0.8),
        top_k=torch.where(kind == 2, 12, VOCAB),
        top_p=torch.where(kind == 2, 0.9, 1.0),
        min_p=torch.where(kind == 2, 0.01, 0.0),
        seeds=index * 977,
        positions=index + 5,
        unfiltered=index[kind == 1],
        filtered=index[kind == 2],
        max_top_k=12,
    )


def shard_of(logits: Tensor, rank: ThreadRank) -> Tensor:
    vocabulary = divide_vocabulary(logits.shape[1], rank=rank.rank, size=rank.size)
    part = logits.narrow(1, vocabulary.ids.start, vocabulary.ids.size)
    return F.pad(part, (0, vocabulary.width - vocabulary.ids.size), value=-math.inf)


def sample_on_all(logits: Tensor, rows: SamplingRows, size: int) -> list[Samples]:
    def run(rank: ThreadRank) -> Samples:
        return ShardedSampler(logits.shape[1], rank).sample(shard_of(logits, rank), rows)

    return on_all(partial(run, rank) for rank in thread_ranks(size))


@pytest.mark.parametrize("size", [2, 4, 7])
def test_tokens_are_those_of_one_rank(size: int):
    torch.manual_seed(0)
    logits, rows = torch.randn(90, VOCAB).mul(3), mixed_rows(90)
    expected = sample(logits, rows)
    for samples in sample_on_all(logits, rows, size):
        assert samples.tokens.tolist() == expected.tokens.tolist()
        assert not samples.failed.any()


def test_one_rank_exchanges_nothing():
    logits, rows = torch.randn(9, VOCAB), mixed_rows(9)
    sampler = ShardedSampler(VOCAB, OneRank())
    assert sampler.sample(logits, rows).tokens.tolist() == sample(logits, rows).tokens.tolist()
    assert sampler.whole_logits(logits) is logits


def test_the_lowest_of_equals_across_ranks():
    logits = torch.zeros(3, 10)
    logits[0, [4, 7]] = 5.0
    logits[1, [8, 9]] = 5.0
    none = torch.arange(0)
    rows = replace(mixed_rows(3), temperatures=torch.zeros(3), unfiltered=none, filtered=none)
    for samples in sample_on_all(logits, rows, 4):
        assert samples.tokens.tolist() == [4, 8, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("token", [0, 60, 100])
def test_a_bad_logit_on_one_rank_fails_its_row_on_all(bad: float, token: int):
    logits, rows = torch.randn(9, VOCAB), mixed_rows(9)
    expected = sample(logits, rows).tokens
    failing = torch.tensor([3, 4, 5])  # one row of each kind
    logits[failing, token] = bad
    results = sample_on_all(logits, rows, 4)
    for samples in results:
        assert samples.failed.nonzero().flatten().tolist() == failing.tolist()
        assert samples.tokens.tolist() == results[0].tokens.tolist()
        assert samples.tokens.min() >= 0
        assert samples.tokens.max() < VOCAB
        good = ~samples.failed
        assert samples.tokens[good].tolist() == expected[good].tolist()


def test_no_possible_token_is_a_failure_and_no_padding_is_sampled():
    for samples in sample_on_all(torch.full((3, 5), -math.inf), mixed_rows(3), 4):
        assert samples.failed.all()
        assert samples.tokens.max() < 5
    # All but one token is impossible, and the last rank has nothing but padding.
    logits = torch.full((30, 5), -math.inf)
    logits[:, 4] = -1e30
    for samples in sample_on_all(logits, replace(mixed_rows(30), max_top_k=0), 4):
        assert samples.tokens.tolist() == [4] * 30


def test_only_filtered_rows_are_gathered():
    logits, rows = torch.randn(9, VOCAB), mixed_rows(9)
    ranks = thread_ranks(2)
    on_all(
        partial(ShardedSampler(VOCAB, rank).sample, shard_of(logits, rank), rows) for rank in ranks
    )
    assert [rank.exchanged for rank in ranks] == [3 * 51 + 3 * 9] * 2


def test_whole_logits():
    logits = torch.randn(3, VOCAB)
    for whole in on_all(
        partial(ShardedSampler(VOCAB, rank).whole_logits, shard_of(logits, rank))
        for rank in thread_ranks(4)
    ):
        assert torch.equal(whole, logits)

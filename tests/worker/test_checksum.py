import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.checksum import (
    cache_words,
    checksum_logprobs,
    checksum_token,
    fold_words,
    position_weights,
)

WIDE = 2**31 - 1
"""A vocabulary in which two contexts do not get the same token by chance."""


def plain_token(token_ids: list[int], seed: int, temperature: float, vocab_size: int) -> int:
    """The definition once more, in Python's unbounded integers."""
    mask = 2**64 - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    fold = 0
    for layer, multiplier in (
        (0x9E3779B97F4A7C15, 0xD1342543DE82EF95),
        (0xC2B2AE3D27D4EB4F, 0xAF251AF3B0F025B5),
    ):
        for position, token in enumerate(token_ids):
            word = mix(((token << 32) | position) ^ layer)
            fold += word * pow(multiplier, position, 2**64)
    key = mix((seed & mask) ^ 0x8CB92BA72F3D8DD7) if temperature >= 1e-5 else 0
    return mix((fold & mask) ^ mix(len(token_ids)) ^ key) % vocab_size


@pytest.mark.parametrize(
    ("token_ids", "seed", "temperature", "vocab_size", "token"),
    [
        ([0], None, 0.0, 32_000, 3988),
        ([1, 2, 3], None, 0.0, 32_000, 9582),
        ([1, 2, 3], 7, 1.0, 32_000, 27_756),
        ([1, 2, 3], -1, 0.7, 32_000, 30_231),
        (list(range(1000)), 2**63 - 1, 2.0, 151_936, 106_432),
    ],
)
def test_golden_tokens(
    token_ids: list[int], seed: int | None, temperature: float, vocab_size: int, token: int
) -> None:
    assert checksum_token(token_ids, seed, temperature, vocab_size) == token


def test_golden_words() -> None:
    words = cache_words(np.array([5], dtype=np.int32), np.array([9], dtype=np.int32))
    assert words.tolist() == [[10740533222099876715, 13645657399153447690]]


token_lists = st.lists(st.integers(0, WIDE - 1), min_size=1, max_size=80)
seeds = st.integers(-(2**63), 2**63 - 1)


@given(token_lists, seeds, st.sampled_from([0.0, 1e-6, 0.5, 2.0]), st.integers(1, WIDE))
def test_the_definition_in_plain_integers_agrees(
    token_ids: list[int], seed: int, temperature: float, vocab_size: int
) -> None:
    expected = plain_token(token_ids, seed, temperature, vocab_size)
    assert checksum_token(token_ids, seed, temperature, vocab_size) == expected


@given(st.data())
def test_any_change_of_the_context_changes_the_token(data: st.DataObject) -> None:
    context = data.draw(token_lists)
    index = data.draw(st.integers(0, len(context) - 1))
    other = data.draw(st.integers(0, len(context) - 1))
    foreign = data.draw(st.integers(0, WIDE - 1))
    swapped = list(context)
    swapped[index], swapped[other] = swapped[other], swapped[index]
    changed = {
        "lost": context[:index] + context[index + 1 :],
        "doubled": [*context[:index], context[index], *context[index:]],
        "swapped": swapped,
        "foreign": [*context[:index], foreign, *context[index + 1 :]],
        "cut": context[:index],
        "longer": [*context, foreign],
    }
    token = checksum_token(context, None, 0.0, WIDE)
    for what, mutant in changed.items():
        if mutant and mutant != context:
            assert checksum_token(mutant, None, 0.0, WIDE) != token, what


@given(st.data())
def test_any_wrong_block_changes_the_fold(data: st.DataObject) -> None:
    """Blocks of 4 words swapped, repeated, of another context, or not written yet."""
    size = 4
    num_blocks = data.draw(st.integers(2, 12))
    tokens = np.arange(num_blocks * size, dtype=np.int32) * 7
    words = cache_words(tokens, np.arange(len(tokens), dtype=np.int32))
    weights = position_weights(len(tokens))
    fold = fold_words(words, weights)
    here = data.draw(st.integers(0, num_blocks - 1)) * size
    there = data.draw(st.integers(0, num_blocks - 1).filter(lambda b: b * size != here)) * size
    foreign = cache_words(tokens + np.int32(1), np.arange(len(tokens), dtype=np.int32))

    def fold_with(target: int, block: np.ndarray) -> np.uint64:
        mutant = words.copy()
        mutant[target : target + size] = block
        return fold_words(mutant, weights)

    swapped = words.copy()
    swapped[here : here + size] = words[there : there + size]
    swapped[there : there + size] = words[here : here + size]
    assert fold_words(swapped, weights) != fold
    assert fold_with(here, words[there : there + size]) != fold
    assert fold_with(here, foreign[here : here + size]) != fold
    assert fold_with(here, np.zeros_like(words[:size])) != fold


def test_the_seed_counts_only_where_sampling_is_not_greedy() -> None:
    context = [5, 6, 7]
    greedy = {checksum_token(context, seed, 0.0, WIDE) for seed in (None, 1, 2)}
    assert len(greedy) == 1
    sampled = {checksum_token(context, seed, 1.0, WIDE) for seed in (1, 2, 3, -1)}
    assert len(sampled | greedy) == 5


def test_tokens_spread_over_the_vocabulary() -> None:
    tokens = [checksum_token([first], None, 0.0, 10) for first in range(1000)]
    counts = np.bincount(tokens, minlength=10)
    assert counts.min() > 70
    assert counts.max() < 130


def test_logprobs_start_with_the_token_and_fall() -> None:
    assert checksum_logprobs(70, 2, 1000) == ([70, 71, 72], [-0.09375, -1.09375, -2.09375])
    assert checksum_logprobs(4, 0, 5) == ([4], [-0.0625])
    assert checksum_logprobs(4, 20, 5)[0] == [4, 0, 1, 2, 3]

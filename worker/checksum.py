"""The arithmetic of the checksum back end: a language model whose every answer is checkable.

A *word* stands for the keys and values of one position in one layer; a *fold* for attention over
all positions so far; the next token is a hash of the fold. All of it is exact integer arithmetic
modulo 2^64:

    word[i, l] = mix((token[i] · 2^32 + i) xor layer[l])              one-to-one in (token, i)
    fold       = Σ word[i, l] · multiplier[l]^i                       over positions i and layers l
    token      = mix(fold xor mix(number of tokens) xor key) mod vocabulary size

Words and powers of an odd number make the fold depend on every token, its position and its order:
one token, or one block, that is lost, repeated, swapped, stale or foreign gives another fold, and
so another token with probability 1 - 1/vocabulary size, and another one at each later step. Of what
chooses tokens only the seed counts, and whether the temperature is 0: there are no logits.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.messages import SamplingParams
from protocol.sampling import sampling
from worker.step_rows import Int32Array

UInt64Array = NDArray[np.uint64]

NUM_LAYERS = 2
GREEDY_BELOW = 1e-5
"""A lower temperature is greedy: the seed does not count."""

_LAYERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)
_MULTIPLIERS = np.array([0xD1342543DE82EF95, 0xAF251AF3B0F025B5], dtype=np.uint64)
_SEED = np.uint64(0x8CB92BA72F3D8DD7)


def checksum_token(
    token_ids: Sequence[int], seed: int | None, temperature: float, vocab_size: int
) -> int:
    """Return the token that follows `token_ids`: the oracle for the whole engine.

    `token_ids` is the prompt and the output so far, at least one token. `seed` counts only where
    `temperature` is not greedy, and must be set there.
    """
    tokens = np.asarray(token_ids, dtype=np.int32)
    words = cache_words(tokens, np.arange(len(tokens), dtype=np.int32))
    fold = fold_words(words, position_weights(len(tokens)))
    key = sampling_key(SamplingParams(seed=seed, temperature=temperature))
    one = next_tokens(
        np.array([fold]), np.array([len(tokens)]), np.array([key], dtype=np.uint64), vocab_size
    )
    return int(one[0])


def checksum_logprobs(token: int, num_top: int, vocab_size: int) -> tuple[list[int], list[float]]:
    """Return ids and log-probabilities for a sampled token: itself, then `num_top` others.

    Made up, but a function of the token, falling, and exact in float32.
    """
    count = 1 + min(num_top, vocab_size - 1)
    ids = [(token + index) % vocab_size for index in range(count)]
    return ids, [-(index + (token % 64) / 64) for index in range(count)]


def cache_words(token_ids: Int32Array, positions: Int32Array) -> UInt64Array:
    """Return what the cache holds for tokens at positions: [tokens, NUM_LAYERS]."""
    pairs = (token_ids.astype(np.uint64) << np.uint64(32)) | positions.astype(np.uint64)
    return _mix(pairs[:, None] ^ _LAYERS)


def position_weights(count: int) -> UInt64Array:
    """Return the weights of positions 0 to count - 1 in a fold: [count, NUM_LAYERS]."""
    weights = np.ones((count, NUM_LAYERS), dtype=np.uint64)
    weights[1:] = _MULTIPLIERS
    return np.multiply.accumulate(weights, axis=0, dtype=np.uint64)


def fold_words(words: UInt64Array, weights: UInt64Array) -> np.uint64:
    """Return the fold of a context; both arrays are [positions, NUM_LAYERS] and contiguous."""
    fold: np.uint64 = np.dot(words.reshape(-1), weights.reshape(-1))
    return fold


def sampling_key(params: SamplingParams) -> int:
    """Return what sampling parameters add to a hash: the mixed seed, or 0 where greedy."""
    if sampling(params).temperature < GREEDY_BELOW:
        return 0
    assert params.seed is not None, "the scheduler sees a seed in every sequence"
    seed = np.array([params.seed], dtype=np.int64).view(np.uint64)
    return int(_mix(seed ^ _SEED)[0])


def next_tokens(
    folds: UInt64Array, num_tokens: NDArray[np.integer], keys: UInt64Array, vocab_size: int
) -> Int32Array:
    """Return the next token of each context: [contexts], as are all arguments."""
    hashes = _mix(folds ^ _mix(num_tokens.astype(np.uint64)) ^ keys)
    return (hashes % np.uint64(vocab_size)).astype(np.int32)


def _mix(values: UInt64Array) -> UInt64Array:
    """Scatter 64-bit values one-to-one (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

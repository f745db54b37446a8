"""The noise of sampling: Gumbel numbers from Philox-4x32-10, a counter-based generator.

Token `t` of the vocabulary, at index `p` of prompt + output, for seed `s`, always gets the same
noise, whatever else runs, on however many ranks, on whatever device:

    key     = (s mod 2³², ⌊s / 2³²⌋ mod 2³²)       s taken as 64 unsigned bits
    counter = (⌊t / 4⌋, p mod 2³², ⌊p / 2³²⌋, 0)
    word    = philox_4x32_10(counter, key)[t mod 4]
    u       = (⌊word / 2⁹⌋ + ½) / 2²³              exact in float32, inside (0, 1)
    noise   = −ln(−ln u)                           float32, −2.8 to 16.6

One round of Philox maps (c0, c1, c2, c3), with key (k0, k1), to

    (hi(M1·c2) ⊕ c1 ⊕ k0,  lo(M1·c2),  hi(M0·c0) ⊕ c3 ⊕ k1,  lo(M0·c0))

where hi and lo are the halves of a 64-bit product; after each round k0 += W0 and k1 += W1. Here the
words live in int64 tensors. A product that overflows keeps its low 64 bits, and an arithmetic
shift followed by a mask gives its high half.
"""

import torch
from torch import Tensor

ROUNDS = 10
M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85

_WORD = 0xFFFFFFFF
_BLOCK_ROWS = 4
"""Rows done at once: a vocabulary of 50,000 then stays in a CPU core's second-level cache,
which makes 16 rows four times as fast as all at once."""


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words for each counter, as int64.

    The counter's tensors must be of one shape and are used up; the key's must broadcast to it.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * M0, c2 * M1
        # c1 and c3 may keep bits above 32: they only meet exclusive-or before a mask.
        torch.bitwise_right_shift(product1, 32, out=c0)
        c0.bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_WORD)
        torch.bitwise_right_shift(product0, 32, out=c2)
        c2.bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_WORD)
        c1, c3 = product1, product0
        k0, k1 = (k0 + W0) & _WORD, (k1 + W1) & _WORD
    return c0, c1.bitwise_and_(_WORD), c2, c3.bitwise_and_(_WORD)


def gumbel_noise(seeds: Tensor, positions: Tensor, *, first_id: int, num_ids: int) -> Tensor:
    """Return the noise of tokens `first_id` to `first_id + num_ids - 1`. [rows, num_ids] float32

    `seeds` and `positions` are [rows] int64.
    """
    first_quad = first_id // 4
    num_quads = -(-(first_id + num_ids) // 4) - first_quad
    quads = torch.arange(first_quad, first_quad + num_quads, device=seeds.device)
    noise = torch.empty(len(seeds), num_ids, device=seeds.device)
    skipped = first_id - 4 * first_quad
    for first in range(0, len(seeds), _BLOCK_ROWS):
        rows = slice(first, first + _BLOCK_ROWS)
        words = torch.stack(_words(quads, seeds[rows], positions[rows]), dim=-1)
        noise[rows] = _gumbel(words.flatten(1)[:, skipped : skipped + num_ids])
    return noise


def gumbel_noise_at(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return the noise of chosen tokens. ids [rows, n] int64 -> [rows, n] float32"""
    words = torch.stack(_words(ids >> 2, seeds, positions), dim=-1)
    return _gumbel(words.gather(-1, (ids & 3).unsqueeze(-1)).squeeze(-1))


def _words(
    quads: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Philox's words for quads [n] or [rows, n] of token ids: four of [rows, n]."""
    shape = (len(seeds), quads.shape[-1])
    position = positions[:, None]
    counter = (
        quads.expand(shape).clone(),
        (position & _WORD).expand(shape).clone(),
        ((position >> 32) & _WORD).expand(shape).clone(),
        torch.zeros(shape, dtype=torch.int64, device=seeds.device),
    )
    seed = seeds[:, None]
    return philox_4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))


def _gumbel(words: Tensor) -> Tensor:
    uniform = ((words >> 9).float() + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_()

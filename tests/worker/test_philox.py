"""Philox against published vectors and against another implementation in plain integers."""

import math

import pytest
import torch

from worker.philox import gumbel_noise, gumbel_noise_at, philox_4x32

WORD = 2**32 - 1


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & WORD, (a >> 32) ^ c[3] ^ k[1], a & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def noise_by_hand(seed: int, position: int, token: int) -> float:
    key = [seed & WORD, (seed >> 32) & WORD]
    words = philox_by_hand([token // 4, position & WORD, position >> 32, 0], key)
    uniform = ((words[token % 4] >> 9) + 0.5) / 2**23
    return -math.log(-math.log(uniform))


def run(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    return [int(word) for word in philox_4x32((c0, c1, c2, c3), (k0, k1))]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_published_vectors(counter: list[int], key: list[int], expected: list[int]):
    """Random123's known-answer tests for philox4x32-10."""
    assert run(counter, key) == expected
    assert philox_by_hand(counter, key) == expected


SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
POSITIONS = [0, 1, 7, 2**31 - 1, 2**33 + 5, 3]


def test_noise_of_every_token():
    noise = gumbel_noise(torch.tensor(SEEDS), torch.tensor(POSITIONS), first_id=0, num_ids=37)
    expected = [
        [noise_by_hand(seed, position, token) for token in range(37)]
        for seed, position in zip(SEEDS, POSITIONS, strict=True)
    ]
    torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("first", "count"), [(0, 4), (4, 8), (1, 1), (3, 6), (6, 21)])
def test_a_shard_has_its_part_of_the_noise(first: int, count: int):
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    whole = gumbel_noise(seeds, positions, first_id=0, num_ids=40)
    shard = gumbel_noise(seeds, positions, first_id=first, num_ids=count)
    assert torch.equal(shard, whole[:, first : first + count])


def test_noise_of_chosen_tokens():
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    whole = gumbel_noise(seeds, positions, first_id=0, num_ids=40)
    ids = torch.randint(0, 40, (6, 11))
    assert torch.equal(gumbel_noise_at(seeds, positions, ids), whole.gather(1, ids))


def test_a_rows_noise_does_not_depend_on_other_rows():
    seeds, positions = torch.arange(20), torch.arange(20) * 3
    whole = gumbel_noise(seeds, positions, first_id=0, num_ids=17)
    for row in range(20):
        rows = slice(row, row + 1)
        alone = gumbel_noise(seeds[rows], positions[rows], first_id=0, num_ids=17)
        assert torch.equal(alone[0], whole[row])


def test_noise_is_finite_and_gumbel():
    noise = gumbel_noise(
        torch.arange(8), torch.zeros(8, dtype=torch.int64), first_id=0, num_ids=50_000
    )
    assert noise.isfinite().all()
    # Mean and variance of the standard Gumbel distribution; 400,000 draws.
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02

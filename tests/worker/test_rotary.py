import cmath
import math

import torch

from worker.layers.rotary import Rotary, inverse_frequencies
from worker.rope_config import FactorScaling, LinearScaling, Llama3Scaling, RopeConfig

CPU = torch.device("cpu")


def test_plain_frequencies():
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001])
    torch.testing.assert_close(inverse_frequencies(8, 10_000.0, None), expected)


def test_linear_and_factor_scaling():
    plain = inverse_frequencies(8, 10_000.0, None)
    halved = inverse_frequencies(8, 10_000.0, LinearScaling(factor=2.0))
    torch.testing.assert_close(halved, plain / 2)
    scaling = FactorScaling(factors=(1.0, 2.0, 4.0, 8.0))
    torch.testing.assert_close(
        inverse_frequencies(8, 10_000.0, scaling), plain / torch.tensor([1.0, 2.0, 4.0, 8.0])
    )


def test_llama3_keeps_short_and_stretches_long_wavelengths():
    scaling = Llama3Scaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain = inverse_frequencies(128, 500_000.0, None)
    ratio = plain / inverse_frequencies(128, 500_000.0, scaling)
    turns = 8192 * plain / (2 * math.pi)
    assert torch.all(ratio[turns > 4.0] == 1.0)
    torch.testing.assert_close(ratio[turns < 1.0], torch.full_like(ratio[turns < 1.0], 8.0))
    between = ratio[(turns >= 1.0) & (turns <= 4.0)]
    assert len(between) > 3
    assert torch.all(between.diff() > 0)


def test_a_pair_turns_as_a_complex_number():
    rotary = Rotary(
        8, RopeConfig(theta=100.0, rotary_dim=8), max_positions=50, dtype=torch.float32, device=CPU
    )
    heads = torch.randn(3, 2, 8)
    before = heads.clone()
    positions = torch.tensor([0, 7, 49])
    rotary(positions).turn_(heads)
    torch.testing.assert_close(heads[0], before[0])
    frequencies = inverse_frequencies(8, 100.0, None).tolist()
    for row, position in enumerate(positions.tolist()):
        for head in range(2):
            for pair in range(4):
                number = complex(before[row, head, pair], before[row, head, pair + 4])
                turned = number * cmath.exp(1j * position * frequencies[pair])
                assert abs(turned.real - heads[row, head, pair]) < 1e-5
                assert abs(turned.imag - heads[row, head, pair + 4]) < 1e-5

import math

import torch

from worker.layers.activation import gated_activation, gelu_and_multiply, silu_and_multiply


def test_gate_then_up():
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    result = silu_and_multiply(torch.cat((gate, up), dim=1))
    torch.testing.assert_close(result, gate / (1 + torch.exp(-gate)) * up)


def test_gelu_by_its_tanh_formula():
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    result = gelu_and_multiply(torch.cat((gate, up), dim=1))
    torch.testing.assert_close(result, gate * (1 + inner.tanh()) / 2 * up)


def test_by_name():
    cpu = torch.device("cpu")
    assert gated_activation("silu", cpu) is silu_and_multiply
    assert gated_activation("gelu_tanh", cpu) is gelu_and_multiply

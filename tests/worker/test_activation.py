import torch

from worker.layers.activation import silu_and_multiply


def test_gate_then_up():
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    result = silu_and_multiply(torch.cat((gate, up), dim=1))
    torch.testing.assert_close(result, gate / (1 + torch.exp(-gate)) * up)

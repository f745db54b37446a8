import torch

from worker.layers.clamped_swiglu import clamped_swiglu
from worker.model_config import SwigluClamp


def test_is_gpt_oss_activation():
    gate = torch.tensor([[1.0, 9.0, -9.0, 0.0]])
    up = torch.tensor([[0.5, 8.0, -8.0, 3.0]])
    kept = gate.clone(), up.clone()
    result = clamped_swiglu(gate, up, SwigluClamp(alpha=1.702, limit=7.0))
    sigmoid = torch.sigmoid(1.702 * torch.tensor([1.0, 7.0, -9.0, 0.0], dtype=torch.float64))
    expected = torch.tensor([[1.5, 7.0 * 8.0, -9.0 * -6.0, 0.0]], dtype=torch.float64) * sigmoid
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(gate, kept[0])
    assert torch.equal(up, kept[1])

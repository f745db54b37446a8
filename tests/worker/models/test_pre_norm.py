"""A layer's sums, where the residual is float32 and where it is not."""

import pytest
import torch

from tests.worker.tiny_models import CPU
from worker.attention.base import ProjectedHeads
from worker.models.feed_forward import FeedForward
from worker.models.pre_norm import PreNormLayer
from worker.models.self_attention import SelfAttention
from worker.parallel import OneRank
from worker.shard import divide_heads
from worker.weights import fill_with_dummies


class EchoAttention:
    """Attends to nothing but the row itself."""

    def attend(self, layer: int, projected: ProjectedHeads) -> torch.Tensor:
        assert layer == 3
        assert projected.rotation is None
        return projected.query.flatten(1).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_layer(dtype: torch.dtype, scale: float):
    torch.manual_seed(0)
    group = OneRank()
    heads = divide_heads(2, 1, rank=0, size=1)
    attention = SelfAttention(
        3,
        16,
        heads,
        8,
        qkv_bias=False,
        output_bias=False,
        scale=scale,
        group=group,
        dtype=dtype,
        device=CPU,
    )
    feed_forward = FeedForward(
        16, 24, bias=False, scale=scale, group=group, dtype=dtype, device=CPU
    )
    layer = PreNormLayer(16, 1e-5, attention, feed_forward, dtype=dtype, device=CPU)
    fill_with_dummies(layer.weights(""), seed=0)
    for name, parameter in layer.named_parameters():
        if "norm" not in name:
            parameter.mul_(10)
    delta, residual = torch.randn(5, 16).to(dtype), torch.randn(5, 16)
    wanted = torch.tensor([4, 1])
    x = delta.float() + residual

    def rms(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (16,), None, 1e-5)

    query = rms(x) @ attention.qkv.weight[:16].float().T
    x = (x + scale * query @ attention.output.product.weight.float().T)[wanted]
    gate, up = (rms(x) @ feed_forward.gate_up.weight.float().T).chunk(2, dim=-1)
    down = feed_forward.down.product.weight.float()
    x += scale * (torch.nn.functional.silu(gate) * up) @ down.T
    with torch.inference_mode():
        last, summed = layer(delta, residual, None, EchoAttention(), wanted)
    assert summed.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(summed + last, x, rtol=0, atol=tolerance)

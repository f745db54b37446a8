import pytest
import torch

from worker.layers.experts import Experts, Router
from worker.models.mixture import Mixture, joint_weights, separate_weights
from worker.parallel import OneRank
from worker.weights import Weight

CPU = torch.device("cpu")


class Rank(OneRank):
    """The second of two, which is never asked to exchange anything."""

    rank = 1
    size = 2


def make(naming, group: OneRank, *, bias: bool, is_packed: bool = False, size: int = 6) -> Mixture:
    router = Router(size, 3, 2, bias=bias, is_renormalised=True, dtype=torch.float32, device=CPU)
    experts = Experts(
        *(3, size, size),
        bias=bias,
        clamp=None,
        is_packed=is_packed,
        group=group,
        dtype=torch.float32,
        device=CPU,
    )
    return Mixture(router, experts, naming)


def filled(mixture: Mixture) -> dict[str, torch.Tensor]:
    """Fill a mixture with numbers that say where they are from; return the checkpoint."""
    tensors = {}
    weights: list[Weight] = list(mixture.weights("mlp."))
    for number, weight in enumerate(weights):
        count = torch.Size(weight.shape).numel()
        tensors[weight.name] = torch.arange(count).view(weight.shape) + 1000.0 * number
        weight.fill(tensors[weight.name])
    return tensors


@torch.inference_mode()
def test_a_rank_takes_its_part_of_separate_tensors():
    mixture = make(separate_weights, Rank(), bias=False)
    tensors = filled(mixture)
    assert set(tensors) == {
        "mlp.gate.weight",
        *(
            f"mlp.experts.{expert}.{part}_proj.weight"
            for expert in range(3)
            for part in ("gate", "up", "down")
        ),
    }
    assert torch.equal(mixture.router.product.weight, tensors["mlp.gate.weight"])
    for expert in range(3):
        gate, up, down = (
            tensors[f"mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        assert torch.equal(mixture.experts.gate_up[expert][0::2], gate[3:])
        assert torch.equal(mixture.experts.gate_up[expert][1::2], up[3:])
        assert torch.equal(mixture.experts.down[expert], down[:, 3:])


@torch.inference_mode()
@pytest.mark.parametrize("group", [OneRank(), Rank()], ids=["alone", "second"])
def test_a_rank_takes_its_part_of_joint_tensors(group: OneRank):
    mixture = make(joint_weights, group, bias=True)
    tensors = filled(mixture)
    first = 3 * group.rank
    experts = mixture.experts
    gate_up = tensors["mlp.experts.gate_up_proj"].transpose(1, 2)
    down = tensors["mlp.experts.down_proj"].transpose(1, 2)
    assert torch.equal(experts.gate_up, gate_up[:, 2 * first :])
    assert torch.equal(experts.down, down[:, :, first:])
    assert experts.gate_up_bias is not None
    assert torch.equal(
        experts.gate_up_bias, tensors["mlp.experts.gate_up_proj_bias"][:, 2 * first :]
    )
    assert tensors["mlp.experts.down_proj_bias"].shape == (3, 6)
    assert (experts.down_bias is None) == (group.rank == 1)
    assert torch.equal(mixture.router.bias, tensors["mlp.router.bias"])


def test_packed_tensors_are_asked_for_in_whole_blocks():
    mixture = make(joint_weights, Rank(), bias=True, is_packed=True, size=96)
    asked = {
        weight.name: (weight.shape, weight.dim, weight.start, weight.end)
        for weight in mixture.weights("")
        if weight.target.dtype == torch.uint8
    }
    # The second of two ranks has inputs 48 to 95, which begin in the middle of a block.
    assert asked == {
        "experts.gate_up_proj_blocks": ((3, 192, 3, 16), 1, 96, 192),
        "experts.gate_up_proj_scales": ((3, 192, 3), 1, 96, 192),
        "experts.down_proj_blocks": ((3, 96, 3, 16), 2, 1, 3),
        "experts.down_proj_scales": ((3, 96, 3), 2, 1, 3),
    }


@torch.inference_mode()
def test_the_residual_is_left_to_the_norm():
    mixture = make(separate_weights, OneRank(), bias=False)
    for weight in mixture.weights(""):
        weight.target.normal_()
    hidden, residual = torch.randn(4, 6), torch.zeros(4, 6)
    delta = mixture.add(hidden, residual)
    assert torch.equal(delta, mixture(hidden))
    assert not residual.any()

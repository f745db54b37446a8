"""A mixture of experts in the place of a layer's feed-forward block, and its checkpoint's names."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from torch import Tensor, nn

from worker.layers.experts import Experts, Router
from worker.layers.mxfp4 import PackedWeight, packed_part
from worker.weights import Weight

WeightNaming: TypeAlias = Callable[[Router, Experts, str], Iterator[Weight]]
"""Yields where each checkpoint tensor goes whose name begins with a prefix."""


class Mixture(nn.Module):
    """Every row through the experts that the router chooses for it."""

    def __init__(self, router: Router, experts: Experts, naming: WeightNaming) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self._naming = naming

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's result whole. [rows, hidden] -> [rows, hidden]"""
        result: Tensor = self.experts(hidden, self.router(hidden))
        return result

    def add(self, hidden: Tensor, residual: Tensor) -> Tensor | None:
        """Return what the residual is still to get: all of it. Both [rows, hidden]."""
        assert hidden.shape == residual.shape, "a row of the residual for each row"
        return self.forward(hidden)

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        yield from self._naming(self.router, self.experts, prefix)


def separate_weights(router: Router, experts: Experts, prefix: str) -> Iterator[Weight]:
    """Yield Qwen's: three tensors an expert, as of a feed-forward block without biases.

    gate                                     [experts, hidden]
    experts.N.gate_proj, experts.N.up_proj   [intermediate size, hidden]
    experts.N.down_proj                      [hidden, intermediate size]
    """
    yield Weight(name=f"{prefix}gate.weight", target=router.product.weight)
    inner = experts.inner
    for expert, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        name = f"{prefix}experts.{expert}"
        for part, target in (("gate_proj", gate_up[0::2]), ("up_proj", gate_up[1::2])):
            yield Weight(
                name=f"{name}.{part}.weight",
                target=target,
                whole_size=inner.whole,
                start=inner.start,
            )
        yield Weight(
            name=f"{name}.down_proj.weight",
            target=down,
            whole_size=inner.whole,
            dim=1,
            start=inner.start,
        )


def joint_weights(router: Router, experts: Experts, prefix: str) -> Iterator[Weight]:
    """Yield GPT-OSS': two tensors of all experts, transposed, or packed and not transposed.

    router                                   [experts, hidden] and a bias
    experts.gate_up_proj                     [experts, hidden, 2 · intermediate size]
    experts.down_proj                        [experts, intermediate size, hidden]
    experts.…_proj_blocks, …_proj_scales     [experts, outputs, blocks of inputs(, 16)]
    experts.…_proj_bias                      [experts, outputs]
    """
    assert router.bias is not None, "GPT-OSS' router has a bias"
    yield Weight(name=f"{prefix}router.weight", target=router.product.weight)
    yield Weight(name=f"{prefix}router.bias", target=router.bias)
    both, inner = experts.inner.scaled(2), experts.inner
    gate_up, down = f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"
    if experts.packed is None:
        yield Weight(
            name=gate_up,
            target=experts.gate_up.transpose(1, 2),
            whole_size=both.whole,
            dim=2,
            start=both.start,
        )
        yield Weight(
            name=down,
            target=experts.down.transpose(1, 2),
            whole_size=inner.whole,
            dim=1,
            start=inner.start,
        )
    else:
        blocks = packed_part(inner)
        yield from _packed(experts.packed.gate_up, gate_up, both.whole, 1, both.start)
        yield from _packed(experts.packed.down, down, blocks.whole, 2, blocks.start)
    yield from _biases(experts, gate_up, down)


def _packed(
    weight: PackedWeight, name: str, whole_size: int, dim: int, start: int
) -> Iterator[Weight]:
    for kind, target in (("blocks", weight.blocks), ("scales", weight.scales)):
        yield Weight(
            name=f"{name}_{kind}", target=target, whole_size=whole_size, dim=dim, start=start
        )


def _biases(experts: Experts, gate_up: str, down: str) -> Iterator[Weight]:
    both = experts.inner.scaled(2)
    assert experts.gate_up_bias is not None, "GPT-OSS' experts have biases"
    yield Weight(
        name=f"{gate_up}_bias",
        target=experts.gate_up_bias,
        whole_size=both.whole,
        dim=1,
        start=both.start,
    )
    # Ranks that do not add the bias take nothing of it, but it is theirs to check.
    bias = experts.down_bias
    hidden_size = experts.hidden_size
    target = experts.gate_up_bias.new_empty(len(experts.gate_up_bias), 0) if bias is None else bias
    yield Weight(name=f"{down}_bias", target=target, whole_size=hidden_size, dim=1)

"""Which checkpoint tensor goes where, and putting it there.

A model lists its `Weight`s; a source (`worker.safetensors_weights`, `worker.gguf_weights`, or the
dummy generator here) fills their targets. Every weight is filled exactly once, from a tensor of
exactly the expected shape, or loading fails with the name of file and tensor.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from worker.layers.head_norm import HeadNorm
from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.layers.projection_norm import ProjectionNorm
from worker.layers.row_parallel import RowParallelLinear
from worker.shard import Shard

DUMMY_STD = 0.02
DUMMY_BYTES = (116, 120)
"""Range of packed numbers, the end not included: as MXFP4 scales they are 2⁻¹¹ to 2⁻⁸."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor of a checkpoint and the memory its values go to.

    A rank that needs only a shard takes `target.shape[dim]` slices of dimension `dim` from
    `start` on; the other dimensions are whole.
    """

    name: str
    """In Hugging Face's naming; other formats translate it."""
    target: Tensor
    whole_size: int | None = None
    """Size of dimension `dim` in the checkpoint; None: the target's."""
    dim: int = 0
    start: int = 0
    is_norm: bool = False
    linear: Linear | None = None
    """The product whose weight it is part of, if it is."""
    rows: slice = field(default_factory=lambda: slice(None))
    """Which outputs of that product."""
    offset: float = 0.0
    """What the model adds to a norm's weight; in GGUF files it has been added."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in the checkpoint."""
        shape = list(self.target.shape)
        if self.whole_size is not None:
            shape[self.dim] = self.whole_size
        return tuple(shape)

    @property
    def end(self) -> int:
        """Index after this rank's last slice of dimension `dim`."""
        return self.start + self.target.shape[self.dim]

    def moved(self, target: Tensor) -> "Weight":
        """Return the weight with another target of the same shape, and of any dtype."""
        assert target.shape == self.target.shape, f"{self.name} moves to {tuple(target.shape)}"
        return replace(self, target=target)

    def fill(self, whole: Tensor) -> None:
        """Copy this rank's shard out of the checkpoint's tensor, converting the dtype."""
        assert tuple(whole.shape) == self.shape, f"{self.name} is {tuple(whole.shape)}"
        self.target.copy_(whole.narrow(self.dim, self.start, self.end - self.start))


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How much was loaded and how long it took; a line in the log."""

    num_bytes: int
    """In the model's dtype."""
    file_bytes: int
    """Read from files; 0 for dummies."""
    read_seconds: float
    """From opening the files until every weight has its values."""
    seconds: float
    """In all: building the model, reading, preparing products."""


def norm_weight(norm: RMSNorm, name: str) -> Weight:
    """Return the weight of a norm."""
    return Weight(name=f"{name}.weight", target=norm.weight, is_norm=True, offset=norm.offset)


def head_norm_weights(norm: HeadNorm, query_name: str, key_name: str) -> Iterator[Weight]:
    """Yield the weights of a head norm."""
    for name, target in zip((query_name, key_name), norm.weight, strict=True):
        yield Weight(name=f"{name}.weight", target=target, is_norm=True, offset=norm.offset)


def projection_norm_weights(
    norm: ProjectionNorm, query_name: str, key_name: str
) -> Iterator[Weight]:
    """Yield the weights of a projection norm, of which a rank has those of its heads."""
    for name, target, heads in (
        (query_name, norm.query_weight, norm.heads.query),
        (key_name, norm.key_weight, norm.heads.key_value),
    ):
        part = heads.scaled(norm.head_dim)
        yield Weight(
            name=f"{name}.weight",
            target=target,
            whole_size=part.whole,
            start=part.start,
            is_norm=True,
        )


def stacked_weights(linear: Linear, parts: Mapping[str, Shard]) -> Iterator[Weight]:
    """Yield the weights of a product that does the work of several, in order of their outputs.

    `parts` gives each one's name in the checkpoint, without ".weight", and this rank's outputs of
    it.
    """
    first = 0
    for name, part in parts.items():
        rows = slice(first, first + part.size)
        targets = {"weight": linear.weight[rows]}
        if linear.bias is not None:
            targets["bias"] = linear.bias[rows]
        for kind, target in targets.items():
            yield Weight(
                name=f"{name}.{kind}",
                target=target,
                whole_size=part.whole,
                start=part.start,
                linear=linear if kind == "weight" else None,
                rows=rows,
            )
        first += part.size
    assert first == linear.out_features, f"{', '.join(parts)} do not fill the product"


def fused_weights(linear: Linear, name: str, parts: Sequence[Shard]) -> Iterator[Weight]:
    """Yield the weights of a product that is one in the checkpoint too: `parts` in order of rows.

    A rank takes its outputs of every part, so there is a `Weight` for each, of one tensor.
    """
    whole = sum(part.whole for part in parts)
    first = source = 0
    for part in parts:
        rows = slice(first, first + part.size)
        targets = {"weight": linear.weight[rows]}
        if linear.bias is not None:
            targets["bias"] = linear.bias[rows]
        for kind, target in targets.items():
            yield Weight(
                name=f"{name}.{kind}",
                target=target,
                whole_size=whole,
                start=source + part.start,
                linear=linear if kind == "weight" else None,
                rows=rows,
            )
        first += part.size
        source += part.whole
    assert first == linear.out_features, f"the parts of {name} do not fill the product"


def row_parallel_weights(linear: RowParallelLinear, name: str) -> Iterator[Weight]:
    """Yield the weights of a product whose inputs are divided among the ranks."""
    weight, inputs = linear.product.weight, linear.inputs
    yield Weight(
        name=f"{name}.weight",
        target=weight,
        whole_size=inputs.whole,
        dim=1,
        start=inputs.start,
        linear=linear.product,
    )
    if linear.has_bias:
        # Ranks that do not add the bias take nothing of it, but it is theirs to check.
        bias = linear.product.bias
        nothing = torch.empty(0, dtype=weight.dtype, device=linear.product.device)
        target = nothing if bias is None else bias
        yield Weight(name=f"{name}.bias", target=target, whole_size=len(weight))


def fill_with_dummies(weights: Iterable[Weight], *, seed: int) -> None:
    """Fill norms so that they scale by 1, the rest with normal numbers of deviation 0.02.

    Packed numbers are some of the size that weights have.
    A tensor's values follow from the seed and its name, so a shard is a part of the same tensor
    on every rank.
    """
    for weight in weights:
        if weight.is_norm:
            weight.target.fill_(1.0 - weight.offset)
            continue
        device = weight.target.device
        generator = torch.Generator(device)
        generator.manual_seed(zlib.crc32(weight.name.encode(), seed & 0xFFFFFFFF))
        whole = torch.empty(weight.shape, dtype=weight.target.dtype, device=device)
        if whole.is_floating_point():
            weight.fill(whole.normal_(0.0, DUMMY_STD, generator=generator))
        else:
            weight.fill(whole.random_(*DUMMY_BYTES, generator=generator))

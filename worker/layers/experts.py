"""A mixture of experts: a router sends each row to k of them, whose results are added weighted.

    hidden ─► router ─► k experts a row and their weights      `Router`, `Routes`
           └► each expert with rows: down(activation(gate, up)), its rows together
           └► a row's results, weighted, added up in float32   `Experts`

Every rank has all experts and a part of each one's intermediate size, as of a plain feed-forward
block, so ranks are equally busy wherever the rows go; a sum over the ranks completes the result.

The rows of gate_up alternate, gate and up of one result side by side, as GPT-OSS stores them: a
tile of the product then has all it needs for the activation (`worker.kernels.expert_products`).
On CPU there is one product for every expert that has rows, and the others are not touched: by
oneDNN's (`worker.layers.linear`), Qwen3-30B-A3B's shapes with 32 experts, 8 a row, take 11 ms of
processor time a layer for one row and 49 ms for 64 in bfloat16, where `F.linear` takes 180 and
190 (one core of an Intel Xeon with AMX).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor, nn

from worker.layers.clamped_swiglu import clamped_swiglu
from worker.layers.linear import (
    Linear,
    OneDnnProduct,
    PlainProduct,
    Product,
    runs_on_onednn,
)
from worker.layers.mxfp4 import PackedExperts
from worker.model_config import SwigluClamp
from worker.parallel import TensorParallel
from worker.shard import Shard, divide


@dataclass(frozen=True, slots=True)
class Routes:
    """Where a step's rows go."""

    experts: Tensor
    """[rows, k] integers, a row's best first"""
    weights: Tensor
    """[rows, k] float32"""


def choose_routes(scores: Tensor, k: int, *, is_renormalised: bool) -> Routes:
    """Send each row to its k greatest scores. [rows, experts]

    Weights are the softmax over all experts, or over the chosen ones if renormalised: a softmax
    over all, divided by the sum of the chosen, is just that.
    """
    scores = scores.float()
    greatest, experts = scores.topk(k, dim=-1)
    if is_renormalised:
        return Routes(experts, greatest.softmax(dim=-1))
    return Routes(experts, (greatest - scores.logsumexp(dim=-1, keepdim=True)).exp_())


class Router(nn.Module):
    """Scores every expert for a row, by one product, and chooses k of them."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        k: int,
        *,
        bias: bool,
        is_renormalised: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._k = k
        self._is_renormalised = is_renormalised
        # On a GPU scores are float32: rounded to 16 bits, close experts would often be a draw.
        out_dtype = torch.float32 if device.type == "cuda" else dtype
        self.product = Linear(
            hidden_size,
            num_experts,
            bias=False,
            dtype=dtype,
            device=device,
            out_dtype=out_dtype,
            keeps_dtype=True,
        )
        self.bias: Tensor | None = (
            nn.Parameter(torch.empty(num_experts, dtype=dtype, device=device), requires_grad=False)
            if bias
            else None
        )
        """[experts]"""

    def forward(self, hidden: Tensor) -> Routes:
        """Return the routes. [rows, hidden]"""
        scores: Tensor = self.product(hidden)
        if scores.is_cuda:
            # Imported here because Triton is there only where there are GPUs.
            from worker.kernels.routing import choose_experts  # noqa: PLC0415

            experts, weights = choose_experts(
                scores, self.bias, self._k, is_renormalised=self._is_renormalised
            )
            return Routes(experts, weights)
        if self.bias is not None:
            scores = scores.float().add_(self.bias)
        return choose_routes(scores, self._k, is_renormalised=self._is_renormalised)


class Experts(nn.Module):
    """All experts' feed-forward blocks, on this rank's part of their intermediate size.

    `packed`, where the checkpoint has them so, are the weights until `prepare` unpacks them.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        clamp: SwigluClamp | None,
        is_packed: bool = False,
        group: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """The activation is silu(gate) · up without `clamp`. The ranks must divide the size."""
        super().__init__()
        self._group = group
        self._clamp = clamp
        self.hidden_size = hidden_size
        self.inner: Shard = divide(intermediate_size, rank=group.rank, size=group.size)

        def empty(*shape: int) -> Tensor:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.packed = (
            PackedExperts.allocate(num_experts, hidden_size, self.inner, device)
            if is_packed
            else None
        )
        held = 0 if is_packed else num_experts
        self.gate_up = empty(held, 2 * self.inner.size, hidden_size)
        """[experts, 2 · inner, hidden], rows of gate and up in turns; empty while packed, and once
        `prepare` has moved it elsewhere"""
        self.down = empty(held, hidden_size, self.inner.size)
        """[experts, hidden, inner]; the same"""
        self.gate_up_bias = empty(num_experts, 2 * self.inner.size) if bias else None
        # Rank 0 adds it.
        self.down_bias = empty(num_experts, hidden_size) if bias and group.rank == 0 else None
        self._each: list[tuple[Product, Product]] | None = None

    def forward(self, hidden: Tensor, routes: Routes) -> Tensor:
        """Return the weighted sum of each row's experts, whole. [rows, hidden] -> the same"""
        if hidden.is_cuda:
            # Imported here because Triton is there only where there are GPUs.
            from worker.kernels.expert_products import run_experts  # noqa: PLC0415

            part = run_experts(
                hidden,
                routes.experts,
                routes.weights,
                self.gate_up,
                self.gate_up_bias,
                self.down,
                self.down_bias,
                self._clamp,
            )
            return self._group.all_reduce(part)
        return self._group.all_reduce(self._one_by_one(hidden, routes))

    def prepare(self) -> None:
        """Unpack the weights, now that they have their values, and choose the products.

        Called once, after loading.
        """
        like = self.down
        if self.packed is not None:
            gate_up, down = self.packed.gate_up, self.packed.down
            self.gate_up = nn.Parameter(gate_up.unpack(like.dtype), requires_grad=False)
            self.down = nn.Parameter(down.unpack(like.dtype), requires_grad=False)
            self.packed = None
        if like.device.type != "cuda":
            self._each = self._products()
            if runs_on_onednn(like.device, like.dtype):
                # The reordered copies are all that is needed.
                self.gate_up = nn.Parameter(like.new_empty(0), requires_grad=False)
                self.down = nn.Parameter(like.new_empty(0), requires_grad=False)

    def _products(self) -> list[tuple[Product, Product]]:
        """Return each expert's two products."""

        def product(weight: Tensor, bias: Tensor | None) -> Product:
            if runs_on_onednn(weight.device, weight.dtype):
                return OneDnnProduct(weight, bias)
            return PlainProduct(weight, bias, weight.dtype)

        return [
            (
                product(gate_up, None if self.gate_up_bias is None else self.gate_up_bias[expert]),
                product(down, None if self.down_bias is None else self.down_bias[expert]),
            )
            for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True))
        ]

    def _one_by_one(self, hidden: Tensor, routes: Routes) -> Tensor:
        """Compute one expert after the other, each with all of its rows."""
        products = self._each or self._products()
        experts, k = routes.experts.flatten(), routes.experts.shape[1]
        # A stable order, so that the same rows give the same bits.
        by_expert = experts.argsort(stable=True)
        rows = by_expert // k
        weights = routes.weights.flatten()[by_expert].unsqueeze(1)
        counts = experts.bincount(minlength=len(products)).tolist()
        result = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        first = 0
        for (gate_up, down), count in zip(products, counts, strict=True):
            if not count:
                continue
            own = slice(first, first + count)
            both = gate_up(hidden.index_select(0, rows[own]))
            part = down(self._activate(both[:, 0::2], both[:, 1::2]))
            result.index_add_(0, rows[own], part.float().mul_(weights[own]))
            first += count
        return result.to(hidden.dtype)

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        if self._clamp is not None:
            return clamped_swiglu(gate, up, self._clamp)
        return F.silu(gate).mul_(up)

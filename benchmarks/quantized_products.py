"""Times products in 16, 8 and 4 bits on a GPU, by the number of rows.

    python -m benchmarks.quantized_products [--shapes qwen3-8b …] [--rows 1 16 …] [--save]

Each is a CUDA graph of many products in a row whose weights together do not fit into the L2 cache.
One JSON row for each product and number of rows, in microseconds; rows of fp8 are quantised within.
`fp8_fast` accumulates fast, which Tokenwire does not do (`worker.layers.fp8`), with the relative
error of both against float64 products of the same codes.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor

from benchmarks.environment import ROOT, commit, today
from benchmarks.flags import whole
from benchmarks.rows import report
from worker.layers.fp8 import Fp8Weight, quantize_rows
from worker.layers.int4 import Int4Weight, SharedScratch
from worker.layers.linear import Product
from worker.product_shapes import rank_products
from worker.tune import KNOWN

RESULTS = ROOT / "benchmarks" / "results" / "quantized_products.jsonl"
ROWS = (1, 4, 16, 64, 256, 2048)
_COLD_BYTES = 256 << 20
"""More than any L2 cache holds."""
_REPLAYS = 10


def main() -> None:
    """Print one JSON line for each product and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=KNOWN, default=["qwen3-8b"])
    parser.add_argument("--rows", nargs="+", type=whole(1), default=ROWS)
    parser.add_argument("--group", type=int, choices=(32, 64, 128), default=128)
    parser.add_argument("--save", action="store_true", help=f"append to {RESULTS.name}")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.quantized_products needs a GPU.")
    for model in arguments.shapes:
        for shape in rank_products(KNOWN[model], tp=1):
            if shape.name != "head":
                measure(
                    {"model": model, "product": shape.name},
                    shape.outputs,
                    shape.inputs,
                    rows=arguments.rows,
                    group=arguments.group,
                    keep_in=RESULTS if arguments.save else None,
                )


@torch.inference_mode()
def measure(
    names: dict[str, str],
    outputs: int,
    inputs: int,
    *,
    rows: Sequence[int],
    group: int,
    keep_in: Path | None,
) -> None:
    """Report one product's rows."""
    device = torch.device("cuda")
    num = max(2, -(-_COLD_BYTES // (outputs * inputs // 2)))
    torch.manual_seed(0)
    wide = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) / inputs**0.5
    eight = [Fp8Weight.quantize(wide) for _ in range(num)]
    scratch = SharedScratch(wide.dtype, device)
    four = [Int4Weight.quantize(wide, group, scratch) for _ in range(num)]
    kinds: dict[str, list[Product]] = {
        "bf16_us": [_Plain(wide.clone()) for _ in range(max(2, num // 4))],
        "fp8_us": [weight.product(None, wide.dtype) for weight in eight],
        "fp8_fast_us": [_Fast(weight) for weight in eight],
        "int4_us": [weight.product(None, wide.dtype) for weight in four],
    }
    for count in rows:
        x = torch.randn(count, inputs, device=device, dtype=torch.bfloat16)
        figures: dict[str, object] = {
            name: round(microseconds(products, x), 2) for name, products in kinds.items()
        }
        codes, scales = quantize_rows(x)
        exact = (codes.double() * scales) @ (eight[0].codes.double() * eight[0].scales[:, None]).t()
        for name in ("fp8", "fp8_fast"):
            error = (kinds[f"{name}_us"][0](x).double() - exact).norm() / exact.norm()
            figures[f"{name}_error"] = round(float(error), 6)
        place = {
            "device": torch.cuda.get_device_name(),
            "commit": commit(),
            "date": today(),
        }
        sizes = {"outputs": outputs, "inputs": inputs, "rows": count}
        report(names | sizes | figures | place, keep_in)


class _Plain:
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight)


class _Fast:
    """`worker.layers.fp8.ScaledProduct`, accumulating fast."""

    def __init__(self, weight: Fp8Weight) -> None:
        from worker.kernels import fp8  # noqa: PLC0415 - Triton is there only where there are GPUs

        self._quantize_rows: Callable[[Tensor], tuple[Tensor, Tensor]] = fp8.quantize_rows
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        codes, scales = self._quantize_rows(x)
        return torch._scaled_mm(
            codes,
            self._weight.codes.t(),
            scales,
            self._weight.scales.view(1, -1),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )


def microseconds(products: Sequence[Product], x: Tensor) -> float:
    """Return how long one of the products takes, in the middle of a graph of all of them."""
    for product in products:
        product(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1000 / _REPLAYS / len(products)


if __name__ == "__main__":
    main()

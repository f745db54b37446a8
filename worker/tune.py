"""`python -m worker.tune --shapes qwen3-0.6b`: measures matrix products, and writes their table.

For each product and number of rows it times `F.linear` and candidate settings of our kernels in a
CUDA graph whose weights are not in the L2 cache. What it finds is printed, and written as a table
for `worker.product_table`. Each candidate is checked against float64 first.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from protocol.errors import ConfigError, ModelFileError
from protocol.user_cache import user_cache_dir
from worker.model_files import read_model_config
from worker.product_shapes import DecoderSizes, ProductShape, config_sizes, rank_products
from worker.table_files import file_name, user_tables

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _qwen3(
    hidden: int, intermediate: int, heads: int, *, kv_heads: int = 8, head_dim: int = 128
) -> DecoderSizes:
    return DecoderSizes(
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=151_936,
    )


KNOWN = {
    "qwen3-0.6b": _qwen3(1024, 3072, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 16),
    "qwen3-4b": _qwen3(2560, 9728, 32),
    "qwen3-8b": _qwen3(4096, 12_288, 32),
    "qwen3-14b": _qwen3(5120, 17_408, 40),
    "qwen3-32b": _qwen3(5120, 25_600, 64),
}
"""Models whose sizes need no file."""


def main(argv: Sequence[str]) -> int:
    """Measure what the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker.tune", description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=[], choices=KNOWN, help="models by name")
    parser.add_argument("--model", action="append", default=[], help="a model directory or file")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each model")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="numbers of rows")
    parser.add_argument("--seconds", type=float, default=240.0, help="time for all of it")
    parser.add_argument("--out", type=Path, help="where the table goes; default: the user's cache")
    parser.add_argument("--pdl", action="store_true", help="let the table name pdl settings")
    parser.add_argument("--no-pdl", action="store_true", help="do not even time pdl settings")
    parser.add_argument(
        "--check", action="store_true", help="only check the kernels on tiny products"
    )
    args = parser.parse_args(argv)
    # Imported here because Triton is there only where there are GPUs.
    import torch  # noqa: PLC0415

    from worker.product_tuning import Tuner, check_kernels  # noqa: PLC0415

    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure")
    if args.check:
        return check_kernels(torch.device("cuda"))
    try:
        sizes = [KNOWN[name] for name in args.shapes]
        for model in args.model:
            config = read_model_config(Path(model))
            config.require_legal_tp(args.tp)
            sizes.append(config_sizes(config))
    except (ConfigError, ModelFileError) as error:
        parser.error(str(error))
    shapes = distinct_shapes(sizes, args.tp)
    if not shapes:
        parser.error("nothing to measure: name a model with --shapes or --model")
    tuner = Tuner(
        torch.device("cuda"), seconds=args.seconds, may_choose_pdl=args.pdl, no_pdl=args.no_pdl
    )
    name = file_name(torch.cuda.get_device_name(), "bfloat16")
    out = args.out or user_tables(user_cache_dir(os.environ)) / name
    out.parent.mkdir(parents=True, exist_ok=True)
    tuner.run(shapes, sorted(set(args.rows)), out)
    print(out)
    return 0


def distinct_shapes(sizes: Sequence[DecoderSizes], tp: int) -> list[ProductShape]:
    """Return the models' products, each shape once, under the first one's name."""
    shapes: dict[tuple[int, int], ProductShape] = {}
    for model in sizes:
        for shape in rank_products(model, tp=tp):
            key = (shape.outputs, shape.inputs)
            known = shapes.get(key)
            name = shape.name if known is None else f"{known.name}, {shape.name}"
            shapes[key] = replace(shape, name=name)
    return list(shapes.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Times how fast weights are read, beside `dd` reading the same files.

    python -m benchmarks.loading [--model DIR] [--gigabytes 1.2] [--runs 5] [--save]

Without `--model` a safetensors file of bfloat16 numbers is made and removed again. Each run reads
it cold, having dropped it from the system's file cache, and warm, by every reader in turn:

    dd            to /dev/null, by blocks of 1 MiB: the file system's own speed
    loader        `worker.safetensors_weights` into fresh memory, as stored
    unchecked     the same without looking for NaN and infinity: what the look costs
    as float32    the loader converting, as on CPU by default
    library       safetensors' `safe_open`, each tensor copied into fresh memory

The fastest of the runs counts: others of a shared machine only slow a reader down. Then every kind
of GGUF storage is read and dequantised from a file of zeros, warm. Prints tables and JSON rows.
"""

import argparse
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import worker.tensor_reader
from benchmarks.environment import commit, cpu_name, today
from benchmarks.flags import positive, whole
from benchmarks.rows import report
from worker.gguf_file import GgufHeader, GgufTensor
from worker.gguf_weights import READABLE, load_gguf
from worker.safetensors_weights import TORCH_DTYPES, load_safetensors, read_headers
from worker.tensor_reader import reading_threads
from worker.weights import Weight

RESULTS = Path(__file__).parent / "results" / "loading.jsonl"
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
GGUF_ROWS, GGUF_COLUMNS = 8192, 4096


@dataclass(frozen=True, slots=True)
class Files:
    """A model directory's safetensors files."""

    directory: Path
    paths: tuple[Path, ...]
    num_bytes: int
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def find_files(directory: Path) -> Files:
    """Return what a directory holds. Raises ModelFileError."""
    stored = read_headers(directory)
    paths = tuple(sorted({tensor.path for tensor in stored.values()}))
    return Files(
        directory,
        paths,
        sum(path.stat().st_size for path in paths),
        {name: (tensor.shape, TORCH_DTYPES[tensor.dtype]) for name, tensor in stored.items()},
    )


def make_file(directory: Path, gigabytes: float) -> None:
    """Write a file of layers like those of a model with 8 billion weights."""
    torch.manual_seed(0)
    layer = {"norm": (4096,), "qkv": (6144, 4096), "output": (4096, 4096), "down": (4096, 12288)}
    weights: dict[str, torch.Tensor] = {}
    while sum(weight.nbytes for weight in weights.values()) < gigabytes * 1e9:
        index = len(weights) // len(layer)
        for name, shape in layer.items():
            weights[f"{index}.{name}"] = torch.randn(shape).to(torch.bfloat16)
    save_file(weights, directory / "model.safetensors")


def read_by_dd(files: Files) -> float:
    """Return the seconds that dd says it took."""
    seconds = 0.0
    for path in files.paths:
        command = ["dd", f"if={path}", "of=/dev/null", "bs=1M"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        said = re.search(r"copied, ([0-9.e-]+) s", done.stderr)
        assert said is not None, done.stderr
        seconds += float(said[1])
    return seconds


def read_by_loader(files: Files, dtype: torch.dtype | None = None) -> float:
    """Return the seconds our loader takes, converting to `dtype` or not at all."""
    started = time.perf_counter()
    weights = [
        Weight(name=name, target=torch.empty(shape, dtype=dtype or stored))
        for name, (shape, stored) in files.tensors.items()
    ]
    load_safetensors(
        files.directory, weights, ignored=frozenset(), threads=reading_threads(ranks=1)
    )
    return time.perf_counter() - started


def read_unchecked(files: Files) -> float:
    """Return the seconds our loader takes if it does not look at the numbers."""
    with mock.patch.object(worker.tensor_reader, "all_finite", return_value=True):
        return read_by_loader(files)


def read_by_library(files: Files) -> float:
    """Return the seconds the safetensors library takes."""
    started = time.perf_counter()
    held = []
    for path in files.paths:
        with safe_open(path, framework="pt") as file:
            held += [file.get_tensor(name).clone() for name in file.keys()]  # noqa: SIM118
    return time.perf_counter() - started


READERS: Mapping[str, Callable[[Files], float]] = {
    "dd": read_by_dd,
    "loader": read_by_loader,
    "unchecked": read_unchecked,
    "as float32": lambda files: read_by_loader(files, torch.float32),
    "library": read_by_library,
}


def drop_from_cache(files: Files) -> str:
    """Make the next read one from the disk, and return how."""
    os.sync()
    try:
        DROP_CACHES.write_text("3")
    except OSError:
        for path in files.paths:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "posix_fadvise"
    return "drop_caches"


def time_readers(files: Files, runs: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each reader, cold and warm."""
    for state in ("cold", "warm"):
        best = dict.fromkeys(READERS, float("inf"))
        how = "read before"
        for _ in range(runs):
            for name, read in READERS.items():
                if state == "cold":
                    how = drop_from_cache(files)
                best[name] = min(best[name], read(files))
        for name, seconds in best.items():
            yield {
                "reader": name,
                "cache": state,
                "by": how,
                "gigabytes": files.num_bytes / 1e9,
                "seconds": round(seconds, 4),
                "gb_s": round(files.num_bytes / seconds / 1e9, 3),
                "of_dd": round(best["dd"] / seconds, 3),
            }


def time_gguf(directory: Path, runs: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each storage kind: one matrix read and dequantised to float32."""
    path = directory / "zeros.gguf"
    numbers = GGUF_ROWS * GGUF_COLUMNS
    target = torch.empty(GGUF_ROWS, GGUF_COLUMNS)
    for kind in READABLE:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = numbers // block * block_bytes
        path.write_bytes(bytes(num_bytes))
        tensor = GgufTensor((GGUF_ROWS, GGUF_COLUMNS), int(kind), 0)
        tensors = {"token_embd.weight": tensor}
        header = GgufHeader(path, num_bytes, {"general.architecture": "qwen3"}, {}, tensors)
        best = float("inf")
        for _ in range(runs):
            started = time.perf_counter()
            load_gguf(
                header,
                [Weight(name="model.embed_tokens.weight", target=target)],
                head_dim=128,
                ignored=frozenset(),
                threads=reading_threads(ranks=1),
            )
            best = min(best, time.perf_counter() - started)
        yield {
            "kind": kind.name,
            "gb_s": round(num_bytes / best / 1e9, 3),
            "giga_numbers_s": round(numbers / best / 1e9, 3),
        }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Time how fast weights are read.")
    parser.add_argument("--model", type=Path, help="model directory; default: a file made for it")
    parser.add_argument("--gigabytes", type=positive, default=1.2, help="size of the made file")
    parser.add_argument("--runs", type=whole(1), default=5)
    parser.add_argument("--save", action="store_true", help=f"append the rows to {RESULTS}")
    options = parser.parse_args()
    about = {"benchmark": "loading", "date": today(), "commit": commit(), "cpu": cpu_name()}
    about["threads"] = str(reading_threads(ranks=1))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        directory = options.model or Path(made)
        if options.model is None:
            make_file(directory, options.gigabytes)
        print(f"{'reader':12} {'cache':5} {'seconds':>8} {'GB/s':>6} {'of dd':>6}")
        for row in time_readers(find_files(directory), options.runs):
            rows.append(row)
            print(
                f"{row['reader']:12} {row['cache']:5} {row['seconds']:8.3f} {row['gb_s']:6.2f} "
                f"{row['of_dd']:6.0%}"
            )
        print(f"\n{'GGUF':12} {'GB/s':>6} {'10⁹ numbers/s':>14}")
        for row in time_gguf(Path(made), options.runs):
            rows.append(row)
            print(f"{row['kind']:12} {row['gb_s']:6.2f} {row['giga_numbers_s']:14.2f}")
    for row in rows:
        report(about | row, RESULTS if options.save else None)


if __name__ == "__main__":
    main()

"""Offline throughput and latency, through the real processes and the client library.

    python -m benchmarks.offline --model MODEL|SHAPE.json [--tp N] [--workload nano …] [--save]

A shape is a config.json without weights, such as those in `benchmarks/shapes/`: the ranks then fill
them with random numbers. Every workload (`benchmarks.workloads`) is timed from the first request's
sending to the last result, after a warm-up of 64 other requests, without the prefix cache. One JSON
row a line; `ms_per_step` is the time divided by the longest output's tokens, prefill included.
"""

import argparse
import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.environment import ROOT, commit, cpu_name, today
from benchmarks.rows import report
from benchmarks.workloads import MAX_MODEL_LEN, TEMPERATURE, WORKLOADS, Request, warm_up
from frontend import LLM, SamplingParams
from worker.config import KV_CACHE_DTYPES
from worker.model_files import read_model_config

RESULTS = ROOT / "benchmarks" / "results" / "offline.jsonl"


def main() -> None:
    """Print one JSON line per workload."""
    arguments = parse_arguments()
    with model_directory(arguments.model) as (model, is_shape):
        started = time.perf_counter()
        with LLM(
            model,
            tp=arguments.tp,
            device=arguments.device,
            dtype=arguments.dtype,
            quantization=arguments.quantization,
            kv_cache_dtype=arguments.kv_cache_dtype,
            attention=arguments.attention,
            enforce_eager=arguments.enforce_eager,
            block_size=arguments.block_size,
            num_blocks=arguments.num_blocks,
            swap_space_gib=arguments.swap_space,
            max_in_flight=arguments.max_in_flight,
            max_model_len=arguments.max_model_len,
            load_format="dummy" if is_shape else "auto",
            prefix_cache=False,
            log_level=arguments.log_level,
        ) as llm:
            common = {
                "engine": "tokenwire",
                "model": Path(arguments.model).stem,
                "tp": arguments.tp,
            }
            init_s = time.perf_counter() - started
            facts = llm.client.status().facts
            place = {
                "init_s": round(init_s, 1),
                "device": device_name(arguments.device),
                "dtype": dtype_name(arguments.dtype, model, arguments.device),
                "quantization": arguments.quantization,
                "kv_cache_dtype": arguments.kv_cache_dtype,
                "attention": facts.back_end if facts else arguments.attention,
                "commit": commit(),
                "date": today(),
            }
            run(llm, warm_up())
            for name in arguments.workload:
                for line in measure(llm, name, arguments.repeat):
                    report(common | line | place, RESULTS if arguments.save else None)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="directory, Hub id, GGUF file or shape")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--num-blocks", type=int, help="so few that sequences give way")
    parser.add_argument("--swap-space", type=float, default=0.0, help="GiB a rank")
    parser.add_argument("--workload", choices=[*WORKLOADS], nargs="+", default=[*WORKLOADS])
    parser.add_argument("--repeat", type=int, default=1, help="runs of each; one row for each")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto"
    )
    parser.add_argument(
        "--attention", choices=("auto", "flash-attn", "fa3", "triton", "torch"), default="auto"
    )
    parser.add_argument("--quantization", choices=("auto", "none", "fp8"), default="auto")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--max-in-flight", type=int, choices=(1, 2), default=2)
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--log-level", default="warning")
    parser.add_argument(
        "--save", action="store_true", help=f"append to {RESULTS.relative_to(ROOT)}"
    )
    return parser.parse_args()


@contextlib.contextmanager
def model_directory(model: str) -> Iterator[tuple[str, bool]]:
    """Yield the model to start with, and whether it is a shape, which has no weights."""
    if not model.endswith(".json"):
        yield model, False
        return
    with tempfile.TemporaryDirectory(prefix="tokenwire-shape-") as directory:
        shutil.copy(model, Path(directory) / "config.json")
        yield directory, True


def measure(llm: LLM, name: str, repeat: int) -> Iterator[dict[str, object]]:
    """Yield one row's figures for every run of a workload."""
    requests = WORKLOADS[name]()
    num_in = sum(len(request.prompt) for request in requests)
    num_out = sum(request.num_output_tokens for request in requests)
    for _ in range(repeat):
        seconds = run(llm, requests)
        yield {
            "work": name,
            "s": round(seconds, 3),
            "out_tok_s": round(num_out / seconds, 1),
            "in_tok": num_in,
            "ms_per_step": round(
                1000 * seconds / max(request.num_output_tokens for request in requests), 3
            ),
        }


def run(llm: LLM, requests: Sequence[Request]) -> float:
    """Answer all requests at once and return the seconds it took; check the tokens' number."""
    params = [
        SamplingParams(
            temperature=TEMPERATURE, max_tokens=request.num_output_tokens, ignore_eos=True
        )
        for request in requests
    ]
    started = time.perf_counter()
    results = llm.generate([request.prompt for request in requests], params, progress=False)
    seconds = time.perf_counter() - started
    for request, result in zip(requests, results, strict=True):
        if len(result.token_ids) != request.num_output_tokens:
            raise SystemExit(
                f"{len(result.token_ids)} tokens came where {request.num_output_tokens} were asked"
            )
    return seconds


def dtype_name(dtype: str, model: str, device: str) -> str:
    """Return what "auto" stands for: the checkpoint's on a GPU, float32 on CPU."""
    if dtype != "auto":
        return dtype
    is_gpu = device != "cpu" and shutil.which("nvidia-smi") is not None
    return read_model_config(Path(model)).dtype if is_gpu else "float32"


def device_name(device: str) -> str:
    """Return the name of what computes."""
    tool = shutil.which("nvidia-smi")
    if device == "cpu" or tool is None:
        return cpu_name()
    query = [tool, "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return names.split("\n", 1)[0] or cpu_name()


if __name__ == "__main__":
    main()

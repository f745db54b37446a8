"""Tokenwire against transformers' `generate` on CPU, side by side in one run.

    python -m benchmarks.cpu [--dtype float32|bfloat16] [--rounds N] [--save]

Both serve the bundled SmolLM2-135M-Instruct on all cores. The workload: `random.seed(0)`, then 16
requests of `randint(32, 128)` random prompt tokens and `randint(32, 96)` output tokens, greedy,
EOS ignored. `batch 1` runs four of them one after the other; `batch 16` runs all at once,
transformers as one left-padded batch, Tokenwire as 16 concurrent HTTP requests. Only useful
tokens count: what transformers computes for a row that is already done does not. The two engines
take turns, each in its own process, and the median of the rounds is reported; the tokens are
compared before any timing.
"""

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from benchmarks.environment import ROOT, commit, cpu_name, today
from benchmarks.rows import report

VOCABULARY = 49_152
RESULTS = ROOT / "benchmarks" / "results" / "cpu.jsonl"


class Request(NamedTuple):
    """One request of the workload."""

    prompt: list[int]
    num_output_tokens: int


Answer = list[list[int]]
Runner = Callable[[list[Request]], Answer]


def workload() -> list[Request]:
    """Return the 16 requests; the same in every run."""
    random.seed(0)
    prompts = [
        [random.randrange(VOCABULARY) for _ in range(random.randint(32, 128))] for _ in range(16)
    ]
    return [Request(prompt, random.randint(32, 96)) for prompt in prompts]


class Tokenwire:
    """`launch.py` with the bundled model, spoken to over HTTP."""

    def __init__(self, dtype: str) -> None:
        flags = ["--port", "0", "--dtype", dtype, "--log-level", "warning"]
        # Every round sends the same prompts: computing them is part of what is measured.
        flags += ["--no-prefix-cache", "--max-model-len", "2048"]
        self._server = subprocess.Popen(
            [sys.executable, "launch.py", *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self._server.stdout is not None
        ready = self._server.stdout.readline().split()
        if not ready:
            raise SystemExit("launch.py did not start; its log above says why")
        fields = dict(field.split("=", 1) for field in ready[1:])
        self.seconds_to_ready = float(fields["seconds"])
        self._netloc = urllib.parse.urlsplit(fields["http"]).netloc

    def run(self, requests: list[Request]) -> Answer:
        """Answer all requests at once."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self._complete, requests))

    def _complete(self, request: Request) -> list[int]:
        body = {
            "prompt": request.prompt,
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        connection = http.client.HTTPConnection(self._netloc, timeout=300)
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = json.loads(connection.getresponse().read())
        connection.close()
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    def stop(self) -> None:
        """Stop the server."""
        self._server.terminate()
        self._server.wait(10)


class Transformers:
    """`generate` in a process of its own, driven over pipes by lines of JSON."""

    def __init__(self, dtype: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transformers_peer", dtype],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.run(workload()[:1])

    def run(self, requests: list[Request]) -> Answer:
        """Answer all requests as one batch."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        answer: Answer = json.loads(self._process.stdout.readline())
        return answer

    def stop(self) -> None:
        """Stop the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def one_by_one(run: Runner, requests: list[Request]) -> Answer:
    """Answer requests one after the other."""
    return [run([request])[0] for request in requests]


def tokens_per_second(run: Callable[[], Answer], useful: int) -> float:
    """Time one run."""
    started = time.perf_counter()
    run()
    return useful / (time.perf_counter() - started)


def compare(dtype: str, rounds: int) -> list[dict[str, object]]:
    """Measure both engines and return one row per engine and workload."""
    ours, theirs = Tokenwire(dtype), Transformers(dtype)
    try:
        requests = workload()
        check_same_tokens(ours.run(requests), theirs.run(requests), exact=dtype == "float32")
        rows: list[dict[str, object]] = []
        for work, batch in (("batch 1", requests[:4]), ("batch 16", requests)):
            useful = sum(request.num_output_tokens for request in batch)
            speeds: dict[str, list[float]] = {"tokenwire": [], "transformers": []}
            for _ in range(rounds):
                for name, run in (("tokenwire", ours.run), ("transformers", theirs.run)):
                    runner = run if work == "batch 16" else _sequential(run)
                    speeds[name].append(tokens_per_second(_bind(runner, batch), useful))
            ratio = statistics.median(speeds["tokenwire"]) / statistics.median(
                speeds["transformers"]
            )
            for name, values in speeds.items():
                rows.append(
                    {
                        "engine": name,
                        "model": "smollm2-135m-instruct",
                        "tp": 1,
                        "work": work,
                        "out_tok_s": round(statistics.median(values), 1),
                        "rounds": [round(value, 1) for value in values],
                        "dtype": dtype,
                        "device": cpu_name(),
                        "commit": commit(),
                        "date": today(),
                    }
                    | (
                        {"ratio": round(ratio, 2), "init_s": ours.seconds_to_ready}
                        if name == "tokenwire"
                        else {}
                    )
                )
        return rows
    finally:
        ours.stop()
        theirs.stop()


def _sequential(run: Runner) -> Runner:
    return lambda requests: one_by_one(run, requests)


def _bind(run: Runner, requests: list[Request]) -> Callable[[], Answer]:
    return lambda: run(requests)


def check_same_tokens(ours: Answer, theirs: Answer, *, exact: bool) -> None:
    """Compare the tokens; in bfloat16 only their number, since exact ties are common there."""
    if [len(row) for row in ours] != [len(row) for row in theirs]:
        raise SystemExit("the engines answered with different numbers of tokens")
    if exact and ours != theirs:
        wrong = sum(a != b for a, b in zip(ours, theirs, strict=True))
        raise SystemExit(f"{wrong} of {len(ours)} answers differ from transformers'")


def main() -> None:
    """Print one JSON line per engine and workload."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="append the rows to results/cpu.jsonl")
    options = parser.parse_args()
    dtypes = ("float32", "bfloat16") if options.dtype == "both" else (options.dtype,)
    for dtype in dtypes:
        for row in compare(dtype, options.rounds):
            report(row, RESULTS if options.save else None)


if __name__ == "__main__":
    main()

"""Where the time of a GPU's steps goes: one rank's runner, without scheduler and messages.

    python -m benchmarks.step_trace --model SHAPE.json|DIR [--rows 1 8 256] [--context 600]

Steps are launched two ahead, as a scheduler's plans are. For each row count it prints the time that
a step takes and, from a profiler and hence from steps of their own, how long the GPU is busy in a
step and with which kernels. `--prefill N` does the same for steps of N prompt tokens, in prompts of
2,048. `--trace DIR` keeps the profiler's traces, for Perfetto.
"""

import argparse
import gzip
import json
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from benchmarks.environment import commit, today
from benchmarks.offline import model_directory
from protocol.columns import pack_int32
from protocol.lifecycle import ProcessConfig
from protocol.messages import Join, SamplingParams, StepPlan
from worker.config import WorkerConfig
from worker.model_runner import ModelRunner
from worker.model_setup import build_model_runner
from worker.runner import LaunchedStep, StepOutput

STEPS = 64
PROFILED_STEPS = 4
PREFILLS = 6
PROMPT = 2048
MAX_TOKENS = 16_384


class Driver:
    """Plans for one runner, launched two ahead."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._step_id = 0
        self._under_way: deque[LaunchedStep] = deque()
        self._used: set[int] = set()
        self.launch_s = 0.0
        """What launches have taken of the host's time."""

    def step(
        self,
        *,
        joins: Sequence[Join] = (),
        leaves: Sequence[int] = (),
        decode: Sequence[int] | None = None,
        chunks: Sequence[tuple[int, int, int, int]] = (),
    ) -> None:
        """Launch a step; collect the one before the last."""
        self._step_id += 1
        plan = StepPlan(
            step_id=self._step_id,
            joins=list(joins),
            leaves=pack_int32(leaves),
            decode=None if decode is None else pack_int32(decode),
            chunks=pack_int32([number for chunk in chunks for number in chunk]),
        )
        if len(self._under_way) == 2:
            self.collect()
        started = time.perf_counter()
        self._under_way.append(self._runner.launch(plan))
        self.launch_s += time.perf_counter() - started

    def collect(self) -> StepOutput:
        """Wait for the oldest step under way."""
        output = self._under_way.popleft().output()
        assert (output.counts >= 0).all(), "a row failed"
        return output

    def finish(self) -> None:
        """Wait for all."""
        while self._under_way:
            self.collect()

    def join(self, slots: Sequence[int], context: int, num_more: int) -> None:
        """Take slots with sequences of `context` tokens and room for more; prefill them."""
        facts = self._runner.facts
        blocks = -(-(context + num_more) // facts.block_size)
        assert (max(slots) + 1) * blocks <= facts.num_blocks, "the KV cache does not hold so many"
        self.step(
            leaves=[slot for slot in slots if slot in self._used],
            joins=[
                Join(
                    slot=slot,
                    generation=self._step_id,
                    token_ids=pack_int32([(7 * slot + i) % 1000 for i in range(context)]),
                    prompt_len=context,
                    params=SamplingParams(temperature=0.6, seed=slot, max_tokens=num_more),
                    block_table=pack_int32(range(slot * blocks, (slot + 1) * blocks)),
                )
                for slot in slots
            ],
            decode=[],
            chunks=[(slot, 0, context, 1) for slot in slots],
        )
        self._used.update(slots)


def main() -> None:
    """Print a table for each row count."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="directory or shape")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 256])
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument(
        "--prefill", type=int, nargs="*", default=[], help="prompt tokens of a step"
    )
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--trace", type=Path, help="directory for the profiler's traces")
    arguments = parser.parse_args()
    with model_directory(arguments.model) as (model, is_shape):
        runner = build_model_runner(
            WorkerConfig(
                process=ProcessConfig(run_dir="unused"),
                model=model,
                device="cuda",
                dtype="bfloat16",
                attention=arguments.attention,
                block_size=arguments.block_size,
                max_model_len=4096,
                max_num_batched_tokens=MAX_TOKENS,
                load_format="dummy" if is_shape else "auto",
            )
        )
    name = Path(arguments.model).stem
    driver = Driver(runner)
    num_more = 2 * STEPS + 2 * PROFILED_STEPS
    for num_rows in arguments.rows:
        slots = list(range(num_rows))
        at_once = max(1, MAX_TOKENS // arguments.context)
        for first in range(0, num_rows, at_once):
            driver.join(slots[first : first + at_once], arguments.context, num_more)
        driver.step(decode=slots)
        report(name, f"decode-{num_rows}", driver, driver.step, STEPS, arguments.trace)
    for num_tokens in arguments.prefill:
        length = min(num_tokens, PROMPT)
        join = partial(driver.join, range(num_tokens // length), length, 1)
        report(name, f"prefill-{num_tokens}", driver, join, PREFILLS, arguments.trace)


def report(
    name: str,
    what: str,
    driver: Driver,
    step: Callable[[], None],
    num_steps: int,
    trace: Path | None,
) -> None:
    """Time steps, profile a few, and print both."""
    step()
    driver.finish()
    driver.launch_s = 0.0
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    driver.finish()
    ms_launch = 1000 * driver.launch_s / num_steps
    ms_step = 1000 * (time.perf_counter() - started) / num_steps
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        driver.finish()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
        if trace is not None:
            trace.mkdir(parents=True, exist_ok=True)
            with (
                file.open("rb") as source,
                gzip.open(trace / f"{name}-{what}.json.gz", "wb") as target,
            ):
                shutil.copyfileobj(source, target)
    kernels = [
        event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    row = {
        "model": name,
        "work": what,
        "ms_per_step": round(ms_step, 4),
        "launch_ms_per_step": round(ms_launch, 4),
    }
    print_kernels(row, kernels)


def print_kernels(row: dict[str, object], kernels: list[dict[str, object]]) -> None:
    """Print how long each kernel runs in a step, and how long none does."""
    spans = sorted((float(str(k["ts"])), float(str(k["dur"])), str(k["name"])) for k in kernels)
    first, last = spans[0][0], max(start + duration for start, duration, _ in spans)
    busy, end = 0.0, 0.0
    for start, duration, _ in spans:
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    totals: dict[str, list[float]] = {}
    for _, duration, kernel in spans:
        totals.setdefault(kernel, []).append(duration)
    row |= {
        "profiled_ms_per_step": round((last - first) / 1000 / PROFILED_STEPS, 4),
        "busy_ms_per_step": round(busy / 1000 / PROFILED_STEPS, 4),
        "kernels_per_step": len(spans) / PROFILED_STEPS,
        "commit": commit(),
        "date": today(),
    }
    print(json.dumps(row), flush=True)
    for kernel, durations in sorted(totals.items(), key=lambda item: -sum(item[1]))[:24]:
        times, total = len(durations) / PROFILED_STEPS, sum(durations)
        print(
            f"  {total / PROFILED_STEPS:9.1f} us  {times:6.1f} x {total / len(durations):8.2f} us  "
            f"{kernel[:100]}",
            flush=True,
        )


if __name__ == "__main__":
    main()

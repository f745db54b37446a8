"""The gaps of a running stream while prompts arrive, with a target for them and without.

    python -m benchmarks.gaps [--targets-ms 0 150 80] [--model MODEL] [--save]

One engine for each target (0: none), policy `latency`, through all processes. A stream decodes;
prompts of `--prompt` random tokens arrive every `--every` seconds and ask for one token. The first
`--warm-up` of them are what the scheduler learns its steps' cost from, and are not counted. One
JSON row a target: percentiles of the stream's gaps, and how long the prompts took.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import time

import numpy as np

from benchmarks.environment import ROOT, commit, cpu_name, today
from benchmarks.rows import report
from frontend import LLM, AsyncClient, SamplingParams

RESULTS = ROOT / "benchmarks" / "results" / "gaps.jsonl"
NUM_IDS = 10_000
ENDLESS = 4_000
"""Output tokens of the stream: more than there is time for."""


def main() -> None:
    """Print one JSON line a target."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--model", default="", help="default: the bundled one")
    parser.add_argument("--targets-ms", type=float, nargs="+", default=[0, 150, 80])
    parser.add_argument("--prompt", type=int, default=400, help="tokens of a prompt")
    parser.add_argument("--every", type=float, default=6.0, help="seconds between prompts")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument(
        "--save", action="store_true", help=f"append to {RESULTS.relative_to(ROOT)}"
    )
    arguments = parser.parse_args()
    random.seed(0)
    prompts = [
        [random.randrange(NUM_IDS) for _ in range(arguments.prompt)]
        for _ in range(arguments.warm_up + arguments.prompts)
    ]
    for target_ms in arguments.targets_ms:
        with LLM(
            arguments.model,
            policy="latency",
            itl_target_ms=target_ms or None,
            max_model_len=ENDLESS + 128,
        ) as llm:
            gaps, taken = asyncio.run(
                measure(llm.client.address, prompts, arguments.every, arguments.warm_up)
            )
        line = {
            "bench": "gaps",
            "itl_target_ms": target_ms or None,
            "prompt": arguments.prompt,
            "prompts": arguments.prompts,
            "gap_ms": {
                "p50": round(float(np.percentile(gaps, 50)) * 1000),
                "p99": round(float(np.percentile(gaps, 99)) * 1000),
                "longest": round(max(gaps) * 1000),
            },
            "gaps": len(gaps),
            "prompt_s": round(statistics.mean(taken), 2),
            "device": cpu_name(),
            "commit": commit(),
            "date": today(),
        }
        report(line, RESULTS if arguments.save else None)


async def measure(
    address: str, prompts: list[list[int]], every_s: float, warm_up: int
) -> tuple[list[float], list[float]]:
    """Return the stream's gaps while prompts are answered, and each prompt's time; seconds."""
    moments: list[float] = []
    spans: list[tuple[float, float]] = []
    runs = asyncio.Event()
    async with AsyncClient(address) as client:

        async def read() -> None:
            params = SamplingParams(max_tokens=ENDLESS, ignore_eos=True, seed=1)
            async for _ in client.stream([1, 2, 3, 4], params):
                moments.append(time.perf_counter())
                runs.set()

        async def ask(prompt: list[int]) -> None:
            started = time.perf_counter()
            await client.generate([prompt], SamplingParams(max_tokens=1, seed=1))
            spans.append((started, time.perf_counter()))

        stream = asyncio.create_task(read())
        await runs.wait()
        asked = []
        for prompt in prompts:
            asked.append(asyncio.create_task(ask(prompt)))
            await asyncio.sleep(every_s)
        await asyncio.gather(*asked)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
    spans.sort()
    counted = spans[warm_up:]
    # Only gaps that overlap with a prompt's answering: the others are plain decoding.
    gaps = [
        after - before
        for before, after in itertools.pairwise(moments)
        if any(start < after and before < end for start, end in counted)
    ]
    return gaps, [end - start for start, end in counted]


if __name__ == "__main__":
    main()

"""Fits a step-cost model to measured runs: `python -m benchmarks.fit_cost --help`.

Every workload of `benchmarks.offline` is scheduled by the real scheduler, which gives the totals of
its steps; the fit finds the costs that turn those into the seconds that were measured. What a
decode row's context costs is given, from the card's bandwidth, because four short workloads cannot
tell it from the rest.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.environment import ROOT
from benchmarks.offline import RESULTS
from benchmarks.simulation.card import CARDS, Card
from benchmarks.simulation.fleet import RoundRobin, simulate
from benchmarks.simulation.replica import Replica
from benchmarks.simulation.trace import TraceRequest
from benchmarks.workloads import MAX_MODEL_LEN, WORKLOADS
from scheduler.policy import ThroughputPolicy
from scheduler.step_cost import StepCost, fit

MAX_NUM_SEQS = 256


def main() -> None:
    """Fit, print how well, and keep the costs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="as named in the results, e.g. qwen3-0.6b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--commit", required=True, help="whose rows to fit")
    parser.add_argument("--read-ns", type=float, required=True, help="of a position that is read")
    parser.add_argument("--hop-us", type=float, default=100.0)
    parser.add_argument("--cache-tokens", type=int, required=True, help="that the KV cache holds")
    parser.add_argument("--save", help=f"as a name in {CARDS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    seconds = measured(RESULTS, arguments.model, arguments.tp, arguments.commit)
    hop_s, read_s = arguments.hop_us * 1e-6, arguments.read_ns * 1e-9
    # The schedule hardly depends on the costs: all requests come at once.
    guess = Card(StepCost(1e-3, 1e-6, read_s, 1e-11), hop_s, arguments.cache_tokens)
    totals = np.array([workload_totals(name, guess) for name in seconds])
    times = np.array(list(seconds.values()))
    left = times - read_s * totals[:, 2]
    step_s, token_s, pair_s = fit(totals[:, [0, 1, 3]], left)
    cost = StepCost(*map(float, (step_s, token_s, read_s, pair_s)))
    explained = totals @ np.array([step_s, token_s, read_s, pair_s])
    rows = {
        name: {"measured_s": time, "fitted_s": round(float(value), 3)}
        for name, time, value in zip(seconds, times.tolist(), explained, strict=True)
    }
    document = {
        "card": asdict(Card(cost, hop_s, arguments.cache_tokens)),
        "fitted_to": {"model": arguments.model, "tp": arguments.tp, "commit": arguments.commit},
        "runs": rows,
    }
    text = json.dumps(document, indent=1)
    print(text)
    if arguments.save:
        CARDS.mkdir(exist_ok=True)
        (CARDS / f"{arguments.save}.json").write_text(text + "\n")


def measured(results: Path, model: str, tp: int, commit: str) -> dict[str, float]:
    """Return the mean seconds of each workload that was measured."""
    runs: dict[str, list[float]] = {}
    for line in results.read_text().splitlines():
        row = json.loads(line)
        if (row["model"], row["tp"], row["commit"]) == (model, tp, commit):
            runs.setdefault(row["work"], []).append(row["s"])
    if not runs:
        raise SystemExit(f"{results} has no row of {model} at TP {tp} of commit {commit}")
    return {name: sum(times) / len(times) for name, times in runs.items()}


def workload_totals(name: str, card: Card) -> list[float]:
    """Return a workload's steps, tokens, positions read and pairs."""
    trace = [
        TraceRequest(0.0, len(request.prompt), request.num_output_tokens)
        for request in WORKLOADS[name]()
    ]
    replica = Replica(
        card,
        ThroughputPolicy(),
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        prefix_cache=False,
    )
    simulate(trace, [replica], RoundRobin())
    return [float(total) for total in replica.totals]


if __name__ == "__main__":
    main()

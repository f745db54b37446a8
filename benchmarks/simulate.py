"""What a trace's requests would get: `python -m benchmarks.simulate --help`.

The real scheduler runs under a virtual clock; steps take what a cost model fitted to measured runs
says (`benchmarks.fit_cost`). The trace is a CSV file (`benchmarks.simulation.trace`) or synthetic:
a Poisson process with log-normal lengths. One JSON line for every load and policy. Seconds are
virtual but for `wall_s`; percentiles are right to 1 %.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import ROOT, commit, today
from benchmarks.flags import between, positive, whole
from benchmarks.rows import report
from benchmarks.simulation.card import CARDS, Card
from benchmarks.simulation.fleet import ROUTERS, simulate
from benchmarks.simulation.prefill_first import prefill_first
from benchmarks.simulation.replica import BLOCK_SIZE, Outcome, Replica
from benchmarks.simulation.trace import (
    Shape,
    TraceError,
    TraceRequest,
    longest_request,
    read_csv,
    synthesize,
)
from protocol.errors import RequestError
from protocol.messages import MAX_MODEL_LEN
from scheduler.policy import LatencyPolicy, Policy, ThroughputPolicy

RESULTS = ROOT / "benchmarks" / "results" / "simulate.jsonl"
POLICIES = ("latency", "throughput", "prefill-first")
"""The last is not a policy of ours, but what another scheduler does."""


def main() -> None:
    """Print one JSON line for every load and policy."""
    arguments = parse_arguments()
    try:
        simulate_all(arguments)
    except (TraceError, RequestError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def simulate_all(arguments: argparse.Namespace) -> None:
    """Print the lines. Raises TraceError, and RequestError where more waits than may."""
    card = Card.load(arguments.card)
    for rate, trace in traces(arguments, longest_sequence(card)):
        for name in arguments.policy:
            started = time.perf_counter()
            outcome = run(trace, card, name, arguments)
            line = {
                "bench": "simulate",
                "card": arguments.card,
                "policy": name,
                "itl_target_ms": arguments.itl_target_ms if name == "latency" else None,
                "requests": len(trace),
                "rate": rate,
                "replicas": arguments.replicas,
                "router": arguments.router,
                **figures(outcome, trace[0].arrival_s),
                "wall_s": round(time.perf_counter() - started, 2),
                "commit": commit(),
                "date": today(),
            }
            report(line, RESULTS if arguments.save else None)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; exits with code 2 and a sentence for what cannot be simulated."""
    shape = Shape()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument(
        "--card",
        choices=sorted(path.stem for path in CARDS.glob("*.json")),
        default="nvidia-h200-qwen3-0.6b",
        help="the card and the model whose steps are imitated",
    )
    parser.add_argument(
        "--policy",
        choices=[*POLICIES],
        nargs="+",
        help="default: all; with several replicas all but prefill-first, which has only one",
    )
    parser.add_argument(
        "--itl-target-ms",
        type=between(0.1, 60_000),
        help="of the latency policy; default: its budget alone",
    )
    parser.add_argument("--trace", type=Path, help="a CSV file in place of a synthetic trace")
    parser.add_argument("--requests", type=whole(1), default=10_000)
    parser.add_argument(
        "--rate", type=positive, nargs="+", default=[20.0], help="requests a second"
    )
    median = whole(1, shape.longest)
    parser.add_argument(
        "--prompt", type=median, default=shape.prompt_median, help="median, in tokens"
    )
    parser.add_argument(
        "--output", type=median, default=shape.output_median, help="median, in tokens"
    )
    parser.add_argument("--groups", type=whole(0), default=0, help="prefix groups; 0: none")
    parser.add_argument(
        "--prefix", type=whole(0), default=shape.num_prefix_tokens, help="tokens a group shares"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=whole(1, 1_000), default=1)
    parser.add_argument("--router", choices=[*ROUTERS], default="least-loaded")
    parser.add_argument("--max-num-seqs", type=whole(1, 65_536), default=256)
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument(
        "--save", action="store_true", help=f"append to {RESULTS.relative_to(ROOT)}"
    )
    arguments = parser.parse_args(argv)
    if arguments.policy is None:
        arguments.policy = [*POLICIES]
        if arguments.replicas > 1:
            arguments.policy.remove("prefill-first")
            print("prefill-first is left out: it has only one replica.", file=sys.stderr)
    elif arguments.replicas > 1 and "prefill-first" in arguments.policy:
        parser.error("--policy prefill-first has only one replica; leave it or --replicas out.")
    if arguments.itl_target_ms is not None and "latency" not in arguments.policy:
        parser.error("--itl-target-ms needs --policy latency; the others have no target.")
    most = longest_sequence(Card.load(arguments.card)) - 2 * shape.longest
    if arguments.prefix > most:
        parser.error(f"--prefix is {arguments.prefix}; a replica holds at most {most}.")
    return arguments


def longest_sequence(card: Card) -> int:
    """Return the most tokens of prompt and output that a replica can hold of one request."""
    return min(MAX_MODEL_LEN, card.cache_tokens // BLOCK_SIZE * BLOCK_SIZE)


def traces(arguments: argparse.Namespace, longest: int) -> list[tuple[float, list[TraceRequest]]]:
    """Return each load's requests a second and its requests. Raises TraceError."""
    if arguments.trace is not None:
        trace = read_csv(arguments.trace, longest)
        seconds = trace[-1].arrival_s - trace[0].arrival_s
        return [(round(len(trace) / seconds, 3) if seconds else float(len(trace)), trace)]
    shape = Shape(
        prompt_median=arguments.prompt,
        output_median=arguments.output,
        num_groups=arguments.groups,
        num_prefix_tokens=arguments.prefix,
    )
    return [
        (rate, synthesize(arguments.requests, rate, shape, arguments.seed))
        for rate in arguments.rate
    ]


def run(
    trace: list[TraceRequest], card: Card, policy: str, arguments: argparse.Namespace
) -> Outcome:
    """Answer a trace under a policy."""
    if policy == "prefill-first":
        return prefill_first(trace, card, arguments.max_num_seqs)
    rule: Policy = ThroughputPolicy()
    if policy == "latency":
        target_ms = arguments.itl_target_ms
        rule = LatencyPolicy(itl_target_s=None if target_ms is None else target_ms / 1000)
    replicas = [replica(rule, card, trace, arguments) for _ in range(arguments.replicas)]
    return simulate(trace, replicas, ROUTERS[arguments.router](arguments.replicas))


def replica(
    policy: Policy, card: Card, trace: list[TraceRequest], arguments: argparse.Namespace
) -> Replica:
    """Return a replica that can take every request of a trace."""
    return Replica(
        card,
        policy,
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=longest_request(trace) + 1,
        prefix_cache=not arguments.no_prefix_cache,
    )


def figures(outcome: Outcome, start_s: float) -> dict[str, float]:
    """Return what is reported of an outcome; times in milliseconds."""
    seconds = outcome.end_s - start_s
    return {
        "out_tok_s": round(outcome.output_tokens / seconds, 1),
        "requests_s": round(outcome.finished / seconds, 2),
        **{
            f"{name}_p{percent}_ms": round(1000 * latencies.percentile(percent), 2)
            for name, latencies in (("ttft", outcome.first_token), ("itl", outcome.gap))
            for percent in (50, 90, 99)
        },
        "ttft_max_ms": round(1000 * outcome.first_token.largest, 2),
        "itl_max_ms": round(1000 * outcome.gap.largest, 2),
        "steps": outcome.steps,
        "cached_tokens": outcome.cached_tokens,
        "preemptions": outcome.preemptions,
    }


if __name__ == "__main__":
    main()

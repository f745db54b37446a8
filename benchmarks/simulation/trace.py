"""Traces: when requests come, and how long they are.

A file is CSV with a header. Columns: `arrival_s`, `prompt_tokens`, `output_tokens`, and for prompts
that begin alike, `prefix_group` (any text; empty: none) and `prefix_tokens` (how many tokens the
group's prompts share; without this column, half of the prompt).
"""

import csv
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")


class TraceRequest(NamedTuple):
    """One request of a trace."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_group: int = 0
    """Requests of one group share their first tokens; 0: shares nothing."""
    num_prefix_tokens: int = 0
    """How many."""


class TraceError(ValueError):
    """A trace file that cannot be used, in one sentence."""


def read_csv(path: Path) -> list[TraceRequest]:
    """Return a file's requests in order of arrival. Raises TraceError with the line at fault."""
    groups: dict[str, int] = {"": 0}
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise TraceError(f"{path} has no column {missing[0]}; it needs {', '.join(COLUMNS)}.")
        requests = [_request(row, f"{path}, line {rows.line_num}", groups) for row in rows]
    if not requests:
        raise TraceError(f"{path} has no requests.")
    return sorted(requests)


def _request(row: dict[str, str], where: str, groups: dict[str, int]) -> TraceRequest:
    try:
        arrival, prompt, output = (
            float(row["arrival_s"]),
            int(row["prompt_tokens"]),
            int(row["output_tokens"]),
        )
        shared = int(row.get("prefix_tokens") or prompt // 2)
    except (TypeError, ValueError):
        raise TraceError(f"{where}: a field is missing or is not a number.") from None
    if not (math.isfinite(arrival) and arrival >= 0 and prompt > 0 and output > 0 and shared >= 0):
        raise TraceError(f"{where}: times must be 0 or more, and lengths more than 0.")
    group = groups.setdefault(row.get("prefix_group") or "", len(groups))
    return TraceRequest(arrival, prompt, output, group, min(shared, prompt) if group else 0)


class Shape(NamedTuple):
    """Lengths of a synthetic trace: log-normal, by median and spread, and cut."""

    prompt_median: int = 512
    prompt_spread: float = 0.8
    """Standard deviation of the length's logarithm."""
    output_median: int = 128
    output_spread: float = 0.6
    longest: int = 3_072
    """Of prompt and output each."""
    num_groups: int = 0
    """Prefix groups, drawn evenly; 0: prompts share nothing."""
    num_prefix_tokens: int = 256


def synthesize(num_requests: int, rate: float, shape: Shape, seed: int = 0) -> list[TraceRequest]:
    """Return a Poisson process of `rate` requests a second with a shape's lengths."""
    draw = random.Random(seed)
    now = 0.0
    requests: list[TraceRequest] = []
    for _ in range(num_requests):
        now += draw.expovariate(rate)
        prompt = _length(draw, shape.prompt_median, shape.prompt_spread, shape.longest)
        output = _length(draw, shape.output_median, shape.output_spread, shape.longest)
        group = draw.randint(1, shape.num_groups) if shape.num_groups else 0
        shared = shape.num_prefix_tokens if group else 0
        # A prompt says something of its own behind what its group shares.
        requests.append(TraceRequest(now, prompt + shared, output, group, shared))
    return requests


def _length(draw: random.Random, median: int, spread: float, longest: int) -> int:
    return max(1, min(longest, round(median * math.exp(draw.gauss(0.0, spread)))))


def longest_request(requests: Iterable[TraceRequest]) -> int:
    """Return the most tokens of prompt and output together."""
    return max(each.num_prompt_tokens + each.num_output_tokens for each in requests)

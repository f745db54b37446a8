"""Traces: when requests come, and how long they are.

A file is CSV with a header. Columns: `arrival_s`, `prompt_tokens`, `output_tokens`, and for prompts
that begin alike, `prefix_group` (any text; empty: none) and `prefix_tokens` (how many tokens the
group's prompts share, the same number in each of them; needed wherever there is a group).
"""

import csv
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from protocol.messages import MAX_MODEL_LEN

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


def read_csv(path: Path, longest: int = MAX_MODEL_LEN) -> list[TraceRequest]:
    """Return a file's requests in order of arrival.

    `longest`: the most tokens of prompt and output that a request may have. Raises TraceError with
    the line at fault.
    """
    try:
        # Spreadsheets begin a file with a byte order mark, which is no part of the first name.
        with path.open(newline="", encoding="utf-8-sig") as file:
            requests = _requests(csv.DictReader(file), path, longest)
    except UnicodeDecodeError:
        raise TraceError(f"{path} is not UTF-8 text.") from None
    except csv.Error as error:
        raise TraceError(f"{path} is not CSV: {error}.") from None
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist.") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}.") from None
    if not requests:
        raise TraceError(f"{path} has no requests.")
    return sorted(requests)


def _requests(rows: "csv.DictReader[str]", path: Path, longest: int) -> list[TraceRequest]:
    names = rows.fieldnames or ()
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise TraceError(f"{path} has no column {missing[0]}; it needs {', '.join(COLUMNS)}.")
    if "prefix_group" in names and "prefix_tokens" not in names:
        raise TraceError(f"{path}, line 1: a column prefix_group needs a column prefix_tokens.")
    groups: dict[str, _Group] = {}
    requests: list[TraceRequest] = []
    for row in rows:
        where = f"{path}, line {rows.line_num}"
        if None in row:
            raise TraceError(f"{where}: there are more fields than the header has.")
        request = _request(row, where, groups)
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        if num_tokens > longest:
            raise TraceError(
                f"{where}: prompt and output have {num_tokens} tokens; "
                f"at most {longest} can be run."
            )
        requests.append(request)
    return requests


class _Group(NamedTuple):
    number: int
    num_prefix_tokens: int


def _request(row: dict[str, str], where: str, groups: dict[str, _Group]) -> TraceRequest:
    name = row.get("prefix_group") or ""
    try:
        arrival, prompt, output = (
            float(row["arrival_s"]),
            int(row["prompt_tokens"]),
            int(row["output_tokens"]),
        )
        shared = int(row.get("prefix_tokens") or ("" if name else 0))
    except (TypeError, ValueError):
        raise TraceError(f"{where}: a field is missing or is not a number.") from None
    if not (math.isfinite(arrival) and arrival >= 0 and prompt > 0 and output > 0 and shared >= 0):
        raise TraceError(f"{where}: times must be 0 or more, and lengths more than 0.")
    if shared > prompt:
        raise TraceError(f"{where}: prefix_tokens is {shared}, but the prompt has {prompt}.")
    if not name:
        return TraceRequest(arrival, prompt, output)
    group = groups.setdefault(name, _Group(len(groups) + 1, shared))
    if shared != group.num_prefix_tokens:
        raise TraceError(
            f"{where}: prefix_tokens is {shared}, but group {name!r} has had "
            f"{group.num_prefix_tokens}."
        )
    return TraceRequest(arrival, prompt, output, group.number, shared)


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

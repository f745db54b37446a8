"""Prints what was measured, and keeps it."""

import json
from collections.abc import Mapping
from pathlib import Path


def report(row: Mapping[str, object], keep_in: Path | None) -> None:
    """Print a row as a JSON line, and append it to a file unless that is None."""
    line = json.dumps(row)
    print(line, flush=True)
    if keep_in is not None:
        keep_in.parent.mkdir(exist_ok=True)
        with keep_in.open("a") as file:
            file.write(line + "\n")

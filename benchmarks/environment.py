"""What a benchmark row says about where it was measured."""

import datetime
import os
import platform
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """Return the checkout's short commit, with "+" if files differ from it.

    A copy without history is told by the environment variable TOKENWIRE_COMMIT.
    """
    if told := os.environ.get("TOKENWIRE_COMMIT"):
        return told
    git = shutil.which("git")
    if git is None:
        return "unknown"
    described = subprocess.run(
        [git, "describe", "--always", "--dirty=+"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def today() -> str:
    """Return the date as YYYY-MM-DD."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def cpu_name() -> str:
    """Return the processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"

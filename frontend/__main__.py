"""`python -m frontend`: one frontend."""

import sys

from frontend.config import FrontendConfig
from frontend.process import run
from protocol.flags import parse_flags
from protocol.lifecycle import run_process


def main() -> int:
    """Run a frontend; return its exit code."""
    config = parse_flags(FrontendConfig, sys.argv[1:], program="python -m frontend")
    name = f"frontend-{config.index}"
    return run_process(name, config.process, lambda lifeline: run(config, lifeline))


if __name__ == "__main__":
    sys.exit(main())

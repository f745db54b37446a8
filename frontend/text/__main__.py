"""`python -m frontend.text`: one text process."""

import sys

from frontend.text.config import TextConfig
from frontend.text.process import run
from protocol.flags import parse_flags
from protocol.lifecycle import run_process


def main() -> int:
    """Run a text process; return its exit code."""
    config = parse_flags(TextConfig, sys.argv[1:], program="python -m frontend.text")
    return run_process("text", config.process, lambda lifeline: run(config, lifeline))


if __name__ == "__main__":
    sys.exit(main())

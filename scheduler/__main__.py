"""`python -m scheduler --run-dir DIR …`: the scheduler, in its own terminal if you like."""

import sys
from functools import partial

from protocol.flags import parse_flags
from protocol.lifecycle import run_process
from scheduler.config import SchedulerConfig
from scheduler.process import run


def main() -> int:
    """Run the scheduler and return its exit code."""
    config = parse_flags(
        SchedulerConfig,
        sys.argv[1:],
        program="python -m scheduler",
        description="Decides which sequences run and what each step computes.",
    )
    return run_process("scheduler", config.process, partial(run, config))


if __name__ == "__main__":
    sys.exit(main())

"""`python -m worker --run-dir DIR --rank 0 …`: one rank, in its own terminal if you like."""

import sys
from functools import partial

from protocol.flags import parse_flags
from protocol.lifecycle import run_process
from worker.config import WorkerConfig
from worker.process import run


def main() -> int:
    """Run one worker and return its exit code."""
    config = parse_flags(
        WorkerConfig,
        sys.argv[1:],
        program="python -m worker",
        description="One tensor-parallel rank: executes the scheduler's plans.",
    )
    return run_process(f"worker-{config.rank}", config.process, partial(run, config))


if __name__ == "__main__":
    sys.exit(main())

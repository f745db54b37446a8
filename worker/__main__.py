"""`python -m worker --run-dir DIR --rank 0 …`: one rank, in its own terminal if you like."""

import sys
from functools import partial

from protocol.errors import ConfigError, ModelFileError
from protocol.flags import parse_flags
from protocol.lifecycle import EXIT_STOPPED, EXIT_USAGE, run_process
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
    if config.explain_kernels:
        return _explain_kernels(config)
    return run_process(f"worker-{config.rank}", config.process, partial(run, config))


def _explain_kernels(config: WorkerConfig) -> int:
    # Imported here because no other start of a worker needs it.
    from worker.kernel_explanation import explain_kernels  # noqa: PLC0415

    try:
        print(explain_kernels(config))
    except (ConfigError, ModelFileError) as error:
        print(f"python -m worker: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_STOPPED


if __name__ == "__main__":
    sys.exit(main())

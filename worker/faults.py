"""Faults that a fake worker commits on purpose, so that the rest of the engine can be tested."""

import os
import random
import signal
import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Which faults, and when. The default is none."""

    min_delay_ms: float = field(
        default=0.0,
        metadata={"flag": "--fault-min-delay-ms", "help": "for tests: shortest wait before a step"},
    )
    max_delay_ms: float = field(
        default=0.0,
        metadata={"flag": "--fault-max-delay-ms", "help": "for tests: longest wait before a step"},
    )
    hang_step: int | None = field(
        default=None,
        metadata={"flag": "--fault-hang-step", "help": "for tests: step id that never ends"},
    )
    crash_step: int | None = field(
        default=None,
        metadata={
            "flag": "--fault-crash-step",
            "help": "for tests: step id in which the process kills itself",
        },
    )
    memory_step: int | None = field(
        default=None,
        metadata={
            "flag": "--fault-memory-step",
            "help": "for tests: step id that runs out of memory",
        },
    )
    numeric_token: int | None = field(
        default=None,
        metadata={
            "flag": "--fault-numeric-token",
            "help": "for tests: token id whose presence before sampling starts counts as NaN",
        },
    )

    def __post_init__(self) -> None:
        if not 0 <= self.min_delay_ms <= self.max_delay_ms:
            raise ValueError(
                f"--fault-min-delay-ms {self.min_delay_ms:g} and --fault-max-delay-ms "
                f"{self.max_delay_ms:g} must be 0 or more, and the first not above the second"
            )


class FaultInjector:
    """Commits faults at the step they are set for; delays are drawn from `seed`."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self._faults = faults
        self._random = random.Random(seed)  # noqa: S311 (repeatable on purpose)

    def before_step(self, step_id: int) -> None:
        """Wait, hang, crash or raise MemoryError, as told for this step."""
        faults = self._faults
        if faults.max_delay_ms > 0:
            delay_ms = self._random.uniform(faults.min_delay_ms, faults.max_delay_ms)
            time.sleep(delay_ms / 1000)
        while step_id == faults.hang_step:
            time.sleep(1)
        if step_id == faults.crash_step:
            os.kill(os.getpid(), signal.SIGKILL)
        if step_id == faults.memory_step:
            raise MemoryError

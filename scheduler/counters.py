"""What the scheduler has done since it started, as numbers that only grow."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Written by `Scheduler`; read by the stats line."""

    steps: int = 0
    """Plans committed."""
    prefill_tokens: int = 0
    """Known tokens planned in chunks."""
    cached_tokens: int = 0
    """Known tokens that admissions found in the prefix index instead."""
    output_tokens: int = 0
    """Tokens committed."""
    dropped_tokens: int = 0
    """Tokens that came for a sequence which had left its slot."""
    preemptions: int = 0
    finished: int = 0
    """Sequences that had their terminal reason, aborted ones included."""

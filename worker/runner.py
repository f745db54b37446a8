"""What the worker's loop asks of a back end, real or fake.

A runner owns its slots (`SlotTable`), its KV cache and its sampler. The loop knows none of these:
it launches plans in order and collects what they produced in the same order. A back end may compute
while the next plan arrives, or be done when `launch` returns; nothing else depends on which.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from protocol.errors import ErrorCode
from protocol.messages import EngineFacts, LogprobColumns, StepPlan
from worker.step_rows import Int32Array, StepRows, int32_view


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced, in plan row order; equal on all ranks but for the logprobs."""

    tokens: Int32Array
    """[rows whose count is 1]"""
    counts: Int32Array
    """[rows] 0: chunk not last; 1; -1: failed."""
    failures: Int32Array
    """[rows whose count is -1] their ErrorCodes."""
    logprobs: LogprobColumns | None = None
    """Entries for rows that asked for them; None if there are none, or on a rank above 0."""
    prompt_logprobs: LogprobColumns | None = None
    """The same of prompt tokens that chunks score."""


class LaunchedStep(Protocol):
    """A step whose work has been handed to the device, which may or may not have done it."""

    def is_done(self) -> bool:
        """Return, without waiting, whether `output` would not wait."""
        ...

    def output(self) -> StepOutput:
        """Wait for the step's work and return what it produced.

        Called once for each step, in step order: what a step finds to have failed counts for later
        ones. Raises as `StepRunner.launch` does.
        """
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step whose back end computes within `launch`."""

    result: StepOutput

    def is_done(self) -> bool:
        """It is."""
        return True

    def output(self) -> StepOutput:
        """Return what it produced."""
        return self.result


class StepRunner(Protocol):
    """One back end on one rank, its weights loaded and its cache allocated."""

    @property
    def facts(self) -> EngineFacts:
        """What this rank has, for its Hello."""
        ...

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Apply a plan and start to compute its rows.

        Plans come in step order, each once, at most two of them not yet collected. Raises
        ProtocolError for a plan that does not fit what earlier plans said, and ProcessError when
        this rank cannot go on; either ends the process. A failure that concerns only some rows is
        an ErrorCode in the output.
        """
        ...


def assemble_output(
    rows: StepRows,
    sampled: Int32Array,
    failed: Mapping[int, ErrorCode],
    logprobs: LogprobColumns | None = None,
    prompt_logprobs: LogprobColumns | None = None,
) -> StepOutput:
    """Put what a back end computed into plan row order.

    `sampled` holds a token for each of `rows.sampled_rows`, a meaningless one where the row failed.
    `failed` gives the rows that failed in this step; those of `rows.failures` are added here.
    """
    sampled_rows = rows.sampled_rows
    counts = np.zeros(rows.num_rows, dtype=np.int32)
    counts[sampled_rows] = 1
    if not failed and not rows.failures:
        return StepOutput(
            tokens=sampled,
            counts=counts,
            failures=int32_view(b""),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    codes = {**failed, **rows.failures}
    counts[list(codes)] = -1
    return StepOutput(
        tokens=sampled[counts[sampled_rows] == 1],
        counts=counts,
        failures=np.array([codes[row] for row in sorted(codes)], dtype=np.int32),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def out_of_memory_output(rows: StepRows) -> StepOutput:
    """Return the output of a step that ran out of memory: no row of it was computed."""
    failed = dict.fromkeys(range(rows.num_rows), ErrorCode.OUT_OF_MEMORY)
    sampled = np.zeros(len(rows.sampled_rows), dtype=np.int32)
    return assemble_output(rows, sampled, failed)

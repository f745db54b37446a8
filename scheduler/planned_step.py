"""A step on its way: what it will compute while it is drafted, what is expected back once sent."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Join, LogprobColumns, StepResult
from scheduler.sequence import Sequence
from scheduler.slot_table import Rows
from scheduler.step_cost import StepCost, StepWork

JOIN_BYTES = 512
"""What a join takes in a frame beside its tokens, blocks and lists of token ids: its parameters,
mostly."""
ID_BYTES = 5
"""What a token id in such a list takes, at most."""
BIAS_BYTES = 9

FAILED = -1
"""In a result's counts: this row's sequence has failed."""


@dataclass(slots=True)
class Chunk:
    """Known tokens of one sequence that a step computes."""

    sequence: Sequence
    slot: int
    generation: int
    start: int
    count: int = 0
    last: bool = False
    """Whether these are its last known tokens, so that the row samples the next one."""

    @property
    def end(self) -> int:
        """Position after the chunk."""
        return self.start + self.count


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    cost: StepCost | None = None
    """What steps cost, as far as it is known."""
    new_blocks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Slot of a decode row to (index in its block table, block)."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, target block), in the order in which they were decided."""
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    """(host block, block)."""
    joins: list[Join] = field(default_factory=list)
    num_scored: int = 0
    """Tokens in chunks of sequences that want log-probabilities of their prompts."""
    join_bytes: int = 0
    """What the joins take in the plan's frame, or a little less."""
    chunks: dict[int, Chunk] = field(default_factory=dict)
    """By slot, in plan order."""
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that gave way to this plan."""
    pending: dict[Sequence, None] = field(default_factory=dict)
    """Running sequences with tokens to prefill that are not planned yet."""
    unwilling: dict[Sequence, None] = field(default_factory=dict)
    """Waiting sequences that do better to wait for what others are computing."""
    admission_closed: bool = False
    """Whether the next in the queue cannot be admitted in this step."""


def join_bytes(sequence: Sequence) -> int:
    """Return what a sequence's join takes in a plan's frame, or a little less."""
    params = sequence.params
    num_ids = len(params.logit_bias) + len(params.allowed_token_ids or ())
    num_ids += sum(map(len, params.bad_word_ids))
    lists = ID_BYTES * num_ids + BIAS_BYTES * len(params.logit_bias)
    return JOIN_BYTES + lists + 4 * (len(sequence.tokens) + len(sequence.block_table))


class Failure(NamedTuple):
    """A row that a result reports as failed."""

    row: int
    code: ErrorCode


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan that is sent but not answered: its rows in order, as (slot, generation)."""

    step_id: int
    decodes: Rows
    chunks: list[Chunk]
    sampled: Rows
    """The rows that sample a token: decode rows, then last chunks."""
    counts: bytes
    """The column of counts of a result without failures."""
    changes: int
    """`SlotTable.changes` when it was planned."""
    work: StepWork | None = None
    """What it computes; None if nobody wants to know."""

    @property
    def num_rows(self) -> int:
        """Rows of the plan: decode rows, then chunks."""
        return len(self.decodes) + len(self.chunks)

    def sampled_rows(self) -> NDArray[np.intp]:
        """Return which of the plan's rows sample a token."""
        return np.flatnonzero(np.frombuffer(self.counts, np.int32))

    def use_of_row(self, row: int) -> tuple[int, int]:
        """Return the slot of one of the plan's rows and its generation then."""
        num_decodes = len(self.decodes)
        if row < num_decodes:
            return int(self.decodes.slots[row]), int(self.decodes.generations[row])
        chunk = self.chunks[row - num_decodes]
        return chunk.slot, chunk.generation

    def failures(self, result: StepResult) -> list[Failure]:
        """Return the rows that failed. Raises ProtocolError for a result of another shape."""
        if result.counts == self.counts:
            return []
        expected = np.frombuffer(self.counts, np.int32)
        counts = np.frombuffer(result.counts, np.int32)
        if len(counts) != len(expected) or not ((counts == expected) | (counts == FAILED)).all():
            raise ProtocolError(
                f"Rank 0's result of step {self.step_id} does not have the counts of its plan: "
                f"{len(counts)} rows where {len(expected)} were planned, or a row with other than "
                "its planned tokens."
            )
        rows = np.flatnonzero(counts == FAILED).tolist()
        codes = np.frombuffer(result.failures, np.int32).tolist()
        if len(rows) != len(codes) or not set(codes) <= set(ErrorCode):
            raise ProtocolError(
                f"Rank 0's result of step {self.step_id} has {len(rows)} failed rows and the "
                f"error codes {codes}; each failed row needs one ErrorCode."
            )
        return [Failure(row, ErrorCode(code)) for row, code in zip(rows, codes, strict=True)]

    def tokens(self, result: StepResult, vocab_size: int) -> NDArray[np.int32]:
        """Return a token for each row of `sampled`, 0 for failed ones.

        Raises ProtocolError for a result with other than one token a sampled row, or with a token
        that is not below `vocab_size`.
        """
        tokens = np.frombuffer(result.tokens, np.int32)
        succeeded = None
        if result.counts != self.counts:
            succeeded = np.frombuffer(result.counts, np.int32)[self.sampled_rows()] != FAILED
        expected = len(self.sampled) if succeeded is None else int(succeeded.sum())
        # Seen as unsigned, a negative token is too large as well.
        if len(tokens) != expected or (expected and tokens.view(np.uint32).max() >= vocab_size):
            raise ProtocolError(
                f"Rank 0's result of step {self.step_id} has {len(tokens)} tokens where "
                f"{expected} rows sampled one, or a token that is not below {vocab_size}."
            )
        if succeeded is None:
            return tokens
        every = np.zeros(len(self.sampled), np.int32)
        every[succeeded] = tokens
        return every

    def check_prompt_logprobs(self, columns: LogprobColumns) -> None:
        """Raise ProtocolError for those of other tokens than chunks score."""
        self.check_logprobs(columns)
        num_decodes = len(self.decodes)
        expected: dict[int, int] = {}
        for row, position in zip(
            np.frombuffer(columns.rows, np.int32).tolist(),
            np.frombuffer(columns.positions, np.int32).tolist(),
            strict=True,
        ):
            chunk = self.chunks[row - num_decodes] if row >= num_decodes else None
            if chunk is None or not (
                position == expected.get(row, chunk.start + 1)
                and position <= chunk.end
                and position < chunk.sequence.num_prompt_tokens
            ):
                raise ProtocolError(
                    f"Rank 0's log-probabilities of step {self.step_id} are not those of the "
                    "prompt tokens that follow its chunks'."
                )
            expected[row] = position + 1

    def check_logprobs(self, columns: LogprobColumns) -> None:
        """Raise ProtocolError for log-probabilities of rows that the plan does not have."""
        rows = np.frombuffer(columns.rows, np.uint32)
        widths = np.frombuffer(columns.n, np.int32)
        is_foreign = len(rows) > 0 and rows.max() >= self.num_rows
        if is_foreign or (widths < 1).any() or widths.sum() != len(columns.ids) // 4:
            raise ProtocolError(
                f"Rank 0's log-probabilities of step {self.step_id} name a row that is not below "
                f"{self.num_rows}, or their widths do not add up."
            )

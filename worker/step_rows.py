"""What one plan asks of a rank, unpacked: the deltas it applied and the rows it computes.

`SlotTable.apply` makes these from a `StepPlan`; every back end reads them. Arrays of a column are
views of the plan's bytes and cannot be written to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ErrorCode

Int32Array: TypeAlias = NDArray[np.int32]


def int32_view(column: bytes) -> Int32Array:
    """Return an int32 column as an array without copying it."""
    return np.frombuffer(column, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of known tokens of one sequence to compute in this step."""

    row: int
    """Its row in the step."""
    slot: int
    start: int
    """Position of its first token."""
    token_ids: Int32Array
    """[count]"""
    is_last: bool
    """Whether the row samples a token: the chunk ends what the sequence knows."""

    @property
    def end(self) -> int:
        """Position after its last token; where is_last, the index of the token it samples."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepRows:
    """One step: deltas for state a back end keeps per slot, then the rows to compute.

    A row is numbered by its place in the plan: decode rows first, then chunks. Rows of slots that
    failed earlier are in `failures` and nowhere else, so a back end computes exactly what it sees.
    """

    step_id: int
    num_rows: int
    """Rows of the plan, failed ones included."""

    leaves: Int32Array
    """[leaves] slots given up."""
    joins: tuple[int, ...]
    """Slots taken."""
    swap_outs: Int32Array
    """[moved, 2] (block, host block), to be done before the copies."""
    swap_ins: Int32Array
    """[moved, 2] (host block, block), to be done after them."""
    copies: Int32Array
    """[copies, 2] (source block, target block), to be done in this order."""
    new_blocks: Int32Array
    """[new, 3] (slot, index in its block table, block)."""

    decode_rows: Int32Array
    """[decode]"""
    decode_slots: Int32Array
    """[decode]"""
    decode_positions: Int32Array
    """[decode] position of the token fed; the token sampled has the index after it."""
    chunks: tuple[Chunk, ...]
    failures: Mapping[int, ErrorCode]
    """Row to the code by which its slot failed: answered, not computed."""

    @property
    def slots(self) -> list[int]:
        """Slots of the rows to compute, in row order."""
        return [*self.decode_slots.tolist(), *(chunk.slot for chunk in self.chunks)]

    @property
    def sampled_rows(self) -> Int32Array:
        """[sampled] rows that sample a token: the decode rows, then the last chunks."""
        return _concatenate(self.decode_rows, [chunk.row for chunk in self._last_chunks])

    @property
    def sampled_slots(self) -> Int32Array:
        """[sampled] their slots."""
        return _concatenate(self.decode_slots, [chunk.slot for chunk in self._last_chunks])

    @property
    def sampled_indices(self) -> Int32Array:
        """[sampled] where in prompt + output each sampled token will stand."""
        indices = self.decode_positions + np.int32(1)
        return _concatenate(indices, [chunk.end for chunk in self._last_chunks])

    @property
    def _last_chunks(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.is_last]


def _concatenate(decode: Int32Array, chunks: list[int]) -> Int32Array:
    return np.concatenate((decode, np.array(chunks, dtype=np.int32))) if chunks else decode

"""The tensors of one step: what a model's forward pass and its attention read.

All tokens of a step lie in one flat row of tensors. Decode rows come first, one token each, then
the chunks, each a run of tokens, then padding:

    tokens     d d d d │ a a a a a │ b b b │ · ·
               decode    chunk a     chunk b  padding
               ├──────── num_tokens ────────┤
               ├──────────── num_rows ──────────┤

Padding rows are computed by the products, which are fastest from a few rows on, and read nothing
from the KV cache and write nothing to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.step_rows import Chunk, Int32Array, StepRows
from worker.upload import Int64Array, upload

PAD_TOKEN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRows:
    """One chunk's place in the flat tensors and in its sequence."""

    first_row: int
    start: int
    """Position of its first token: how many tokens of its sequence are already in the cache."""
    count: int
    block_table: Tensor
    """[blocks] int32, the blocks that hold positions 0 to start + count - 1."""

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBatch:
    """All chunks of a step side by side, for a kernel that does them in one call."""

    query_starts: Tensor
    """[chunks + 1] int32, the first row of each chunk among the chunks' rows, then their number."""
    lengths: Tensor
    """[chunks] int32, tokens up to the end of each chunk."""
    length_starts: Tensor
    """[chunks + 1] int32, running sums of the lengths, from 0."""
    block_tables: Tensor
    """[chunks, blocks] int32; the pad block after a chunk's last."""
    max_count: int
    """Rows of the longest chunk."""
    max_length: int
    """The largest of the lengths."""
    is_fresh: bool
    """Every chunk starts its sequence, so that lengths are counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The rows that sample a token: decode rows, then ends of last chunks."""

    slots: Tensor
    """[sampled] int64"""
    indices: Tensor
    """[sampled] int64, where in prompt + output each token will stand."""
    host_slots: Int32Array
    """[sampled] the same slots, on the host."""

    def __len__(self) -> int:
        return len(self.host_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step's rows on the device."""

    tokens: Tensor
    """[num_rows] int64"""
    positions: Tensor
    """[num_rows] int64, of each token in its sequence."""
    cache_positions: Tensor
    """[num_tokens] int64, where each token's key and value go: block · block_size + offset."""
    num_tokens: int
    num_decode: int
    decode_lengths: Int32Array
    """[num_decode] tokens each decode row attends to, itself included. On the host."""
    device_lengths: Tensor
    """[num_decode] int32, the same."""
    decode_blocks: Tensor
    """[num_decode, max blocks] int32 block tables; the pad block after a row's last."""
    opened_blocks: tuple[int, ...]
    """Blocks this step begins to fill: past what is written they hold another sequence's
    leavings. Blocks that it fills wholly need not be here."""
    chunks: tuple[ChunkRows, ...]
    chunk_batch: ChunkBatch | None
    """The same chunks; None if there are none."""
    sampled: SampledRows
    wanted_rows: Tensor
    """[sampled or more] int64, their rows, padded as rows are; some row if there is none. Behind
    the padding rows to be scored."""
    num_scored: int = 0
    """How many of these there are."""

    @property
    def num_rows(self) -> int:
        """Rows with padding."""
        return len(self.tokens)


class BatchBuilder:
    """Turns a plan's rows into tensors. Holds what all steps share, no state of any step."""

    def __init__(
        self, *, block_size: int, pad_block: int, min_rows: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._pad_block = pad_block
        self._min_rows = min_rows
        self._device = device

    def build(
        self,
        rows: StepRows,
        block_tables: Int32Array,
        last_tokens: Tensor,
        scored: Int64Array | None = None,
    ) -> ForwardBatch:
        """Return the batch of a step with at least one row to compute.

        `block_tables` is the host's [slots, max blocks], -1 where there is no block; `last_tokens`
        the device's [slots] tokens that decode rows are fed, which the host has not seen. `scored`
        are rows that are wanted beside those that sample.
        """
        slots, num_decode = rows.decode_slots, len(rows.decode_slots)
        positions = _positions(rows)
        num_tokens = len(positions)
        num_rows = max(num_tokens, self._min_rows)
        lengths = rows.decode_positions + np.int32(1)
        counts = [len(chunk.token_ids) for chunk in rows.chunks]
        first_rows = num_decode + np.cumsum([0, *counts])
        (
            tokens,
            device_positions,
            cache_positions,
            decode_slots,
            device_lengths,
            decode_blocks,
            query_starts,
            chunk_lengths,
            length_starts,
            chunk_blocks,
            wanted_rows,
            sampled_slots,
            sampled_indices,
        ) = upload(
            (
                self._known_tokens(rows, num_rows),
                np.pad(positions, (0, num_rows - num_tokens)),
                self.cache_positions(rows, block_tables),
                slots.astype(np.int64),
                lengths,
                self._tables(slots, lengths, block_tables),
                *self._chunk_columns(rows.chunks, counts, block_tables),
                self._wanted_rows(rows.chunks, first_rows, scored),
                rows.sampled_slots.astype(np.int64),
                rows.sampled_indices.astype(np.int64),
            ),
            self._device,
        )
        if num_decode:
            torch.index_select(last_tokens, 0, decode_slots, out=tokens[:num_decode])
        return ForwardBatch(
            tokens=tokens,
            positions=device_positions,
            cache_positions=cache_positions,
            num_tokens=num_tokens,
            num_decode=num_decode,
            decode_lengths=lengths,
            device_lengths=device_lengths,
            decode_blocks=decode_blocks,
            opened_blocks=self._opened_blocks(rows, block_tables),
            chunks=tuple(
                ChunkRows(
                    first_row=first_row,
                    start=chunk.start,
                    count=count,
                    block_table=chunk_blocks[index, : -(-chunk.end // self._block_size)],
                )
                for index, (chunk, count, first_row) in enumerate(
                    zip(rows.chunks, counts, first_rows.tolist(), strict=False)
                )
            ),
            chunk_batch=ChunkBatch(
                query_starts=query_starts,
                lengths=chunk_lengths,
                length_starts=length_starts,
                block_tables=chunk_blocks,
                max_count=max(counts),
                max_length=max(chunk.end for chunk in rows.chunks),
                is_fresh=all(chunk.start == 0 for chunk in rows.chunks),
            )
            if rows.chunks
            else None,
            sampled=SampledRows(
                slots=sampled_slots, indices=sampled_indices, host_slots=rows.sampled_slots
            ),
            wanted_rows=wanted_rows,
            num_scored=0 if scored is None else len(scored),
        )

    def _known_tokens(self, rows: StepRows, num_rows: int) -> Int64Array:
        """Return the tokens of chunks in their rows, and the padding."""
        tokens = np.full(num_rows, PAD_TOKEN, dtype=np.int64)
        first = len(rows.decode_slots)
        for chunk in rows.chunks:
            tokens[first : first + len(chunk.token_ids)] = chunk.token_ids
            first += len(chunk.token_ids)
        return tokens

    def cache_positions(self, rows: StepRows, block_tables: Int32Array) -> Int64Array:
        """Return where each token's key and value go, decode rows first. [tokens]"""
        row_slots = np.concatenate(
            [
                rows.decode_slots,
                *(np.full(len(chunk.token_ids), chunk.slot) for chunk in rows.chunks),
            ]
        )
        blocks, offsets = np.divmod(_positions(rows), self._block_size)
        cache_positions: Int64Array = block_tables[row_slots, blocks].astype(np.int64)
        assert cache_positions.min() >= 0, "a row's position lies outside its blocks"
        cache_positions *= self._block_size
        cache_positions += offsets
        return cache_positions

    def _tables(
        self, slots: NDArray[np.int32], lengths: Int32Array, tables: Int32Array
    ) -> Int32Array:
        """Return the block tables of slots, at least as wide as the longest of the lengths."""
        most = -(-int(lengths.max(initial=0)) // self._block_size)
        rows = tables[slots, :most]
        # A table may hold blocks past the row's length, which may be another's by the time it
        # gets there; a row reads only the blocks it has filled.
        held = -(-lengths // np.int32(self._block_size))
        rows[np.arange(most) >= held[:, None]] = self._pad_block
        return rows

    def _chunk_columns(
        self, chunks: Sequence[Chunk], counts: Sequence[int], block_tables: Int32Array
    ) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
        """Return query starts, lengths, length starts and block tables of the chunks."""
        lengths = np.array([chunk.end for chunk in chunks], dtype=np.int32)
        slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
        return (
            np.cumsum([0, *counts], dtype=np.int32),
            lengths,
            np.concatenate((np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32))),
            self._tables(slots, lengths, block_tables),
        )

    def _opened_blocks(self, rows: StepRows, block_tables: Int32Array) -> tuple[int, ...]:
        slots, positions = rows.decode_slots, rows.decode_positions
        opens = positions % self._block_size == 0
        decoded: list[int] = block_tables[
            slots[opens], positions[opens] // self._block_size
        ].tolist()
        last_starts = [chunk.end // self._block_size * self._block_size for chunk in rows.chunks]
        chunked = [
            int(block_tables[chunk.slot, last_start // self._block_size])
            for chunk, last_start in zip(rows.chunks, last_starts, strict=True)
            if chunk.start <= last_start < chunk.end
        ]
        return (*decoded, *chunked)

    def _wanted_rows(
        self, chunks: Sequence[Chunk], first_rows: NDArray[np.int64], scored: Int64Array | None
    ) -> Int64Array:
        """Return the rows that sample, or some, and those scored.

        `first_rows` ends with the rows' number.
        """
        sampling = self._sampling_rows(chunks, first_rows)
        return sampling if scored is None else np.concatenate((sampling, scored))

    def _sampling_rows(self, chunks: Sequence[Chunk], first_rows: NDArray[np.int64]) -> Int64Array:
        num_decode = int(first_rows[0])
        ends = [end - 1 for chunk, end in zip(chunks, first_rows[1:], strict=True) if chunk.is_last]
        indices = np.concatenate((np.arange(num_decode), ends)).astype(np.int64)
        if not len(indices):
            # The products of no row are none; those of one cost nothing.
            return np.zeros(self._min_rows, dtype=np.int64)
        return np.pad(indices, (0, max(0, self._min_rows - len(indices))), mode="edge")


def _positions(rows: StepRows) -> Int64Array:
    """Return each token's position in its sequence, decode rows first. [tokens]"""
    parts = [np.arange(chunk.start, chunk.end) for chunk in rows.chunks]
    return np.concatenate([rows.decode_positions, *parts]).astype(np.int64)

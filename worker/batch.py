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

PAD_TOKEN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRows:
    """One chunk's place in the flat tensors and in its sequence."""

    first_row: int
    start: int
    """Position of its first token: how many tokens of its sequence are already in the cache."""
    count: int
    block_table: Tensor
    """[blocks] int64, the blocks that hold positions 0 to start + count - 1."""

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.count


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
    decode_blocks: Tensor
    """[num_decode, max blocks] int64 block tables; the pad block after a row's last."""
    opened_blocks: tuple[int, ...]
    """Blocks this step begins to fill: past what is written they hold another sequence's
    leavings. Blocks that it fills wholly need not be here."""
    chunks: tuple[ChunkRows, ...]
    num_sampled: int
    """Rows that sample a token: decode rows, then ends of last chunks."""
    logit_rows: Tensor
    """[num_sampled or more] int64, those rows, padded as rows are; empty if there is none."""

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

    def build(self, rows: StepRows, block_tables: Int32Array, last_tokens: Tensor) -> ForwardBatch:
        """Return the batch of a step with at least one row to compute.

        `block_tables` is the host's [slots, max blocks], -1 where there is no block; `last_tokens`
        the device's [slots] tokens that decode rows are fed, which the host has not seen.
        """
        slots = rows.decode_slots
        num_decode = len(slots)
        positions = self._positions(rows)
        num_tokens = len(positions)
        num_rows = max(num_tokens, self._min_rows)
        row_slots = np.concatenate(
            [slots, *(np.full(len(chunk.token_ids), chunk.slot) for chunk in rows.chunks)]
        )
        blocks, offsets = np.divmod(positions, self._block_size)
        cache_positions = block_tables[row_slots, blocks].astype(np.int64)
        assert cache_positions.min() >= 0, "a row's position lies outside its blocks"
        cache_positions *= self._block_size
        cache_positions += offsets

        padded_positions = np.zeros(num_rows, dtype=np.int64)
        padded_positions[:num_tokens] = positions
        lengths = rows.decode_positions + np.int32(1)
        chunks = self._chunks(rows.chunks, num_decode, block_tables)
        return ForwardBatch(
            tokens=self._tokens(rows, num_rows, last_tokens),
            positions=self._to_device(padded_positions),
            cache_positions=self._to_device(cache_positions),
            num_tokens=num_tokens,
            num_decode=num_decode,
            decode_lengths=lengths,
            decode_blocks=self._decode_blocks(slots, lengths, block_tables),
            opened_blocks=self._opened_blocks(rows, block_tables),
            chunks=chunks,
            num_sampled=num_decode + sum(chunk.is_last for chunk in rows.chunks),
            logit_rows=self._logit_rows(num_decode, rows.chunks, chunks),
        )

    def _positions(self, rows: StepRows) -> NDArray[np.int64]:
        parts = [np.arange(chunk.start, chunk.end) for chunk in rows.chunks]
        return np.concatenate([rows.decode_positions, *parts]).astype(np.int64)

    def _tokens(self, rows: StepRows, num_rows: int, last_tokens: Tensor) -> Tensor:
        known = np.full(num_rows - len(rows.decode_slots), PAD_TOKEN, dtype=np.int64)
        end = 0
        for chunk in rows.chunks:
            known[end : end + len(chunk.token_ids)] = chunk.token_ids
            end += len(chunk.token_ids)
        slots = self._to_device(rows.decode_slots.astype(np.int64))
        return torch.cat((last_tokens.index_select(0, slots), self._to_device(known)))

    def _decode_blocks(
        self, slots: Int32Array, lengths: Int32Array, block_tables: Int32Array
    ) -> Tensor:
        most = -(-int(lengths.max(initial=0)) // self._block_size)
        tables = block_tables[slots, :most].astype(np.int64)
        # A table may hold blocks past the row's length, which may be another's by the time it
        # gets there; a row reads only the blocks it has filled.
        held = -(-lengths // np.int32(self._block_size))
        tables[np.arange(most) >= held[:, None]] = self._pad_block
        return self._to_device(tables)

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

    def _chunks(
        self, chunks: Sequence[Chunk], num_decode: int, block_tables: Int32Array
    ) -> tuple[ChunkRows, ...]:
        placed: list[ChunkRows] = []
        first_row = num_decode
        for chunk in chunks:
            blocks = -(-chunk.end // self._block_size)
            table = block_tables[chunk.slot, :blocks].astype(np.int64)
            placed.append(
                ChunkRows(
                    first_row=first_row,
                    start=chunk.start,
                    count=len(chunk.token_ids),
                    block_table=self._to_device(table),
                )
            )
            first_row += len(chunk.token_ids)
        return tuple(placed)

    def _logit_rows(
        self, num_decode: int, chunks: Sequence[Chunk], placed: Sequence[ChunkRows]
    ) -> Tensor:
        ends = [
            rows.first_row + rows.count - 1
            for chunk, rows in zip(chunks, placed, strict=True)
            if chunk.is_last
        ]
        indices = np.concatenate((np.arange(num_decode), ends)).astype(np.int64)
        if 0 < len(indices) < self._min_rows:
            indices = np.pad(indices, (0, self._min_rows - len(indices)), mode="edge")
        return self._to_device(indices)

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

"""Random paged batches, run through a back end and compared with attention written out plainly.

A case has sequences of odd lengths around block boundaries, some of which decode while others have
a chunk. Their blocks lie scattered in the cache. Whatever no sequence has written is as wrong as
another may have left it: NaN where a back end clears what it opens, else merely large.

With a cache in fp8 what is compared with is attention over the rounded keys and values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.attention.base import DecodeRows, LayerAttention, ProjectedHeads, StepAttention
from worker.attention.choice import AttentionChoice, build_attention
from worker.attention.paged import PagedAttention
from worker.batch import BatchBuilder, ForwardBatch
from worker.chunk_inputs import ChunkInputs
from worker.decode_inputs import DecodeInputs
from worker.kv_cache import KVCache, KVCacheShape, KVLayout
from worker.kv_rounding import E4M3, round_to_e4m3
from worker.layers.rotary import Rotation
from worker.slot_tables import SlotTables
from worker.step_rows import Chunk, Int32Array, StepRows, int32_view

COMPUTE_IN_FP8 = ("fa3",)
"""Back ends that round queries and the softmax's weights too where the cache is in fp8."""
ALLOWED_RATIO = 2
"""How many times as far off as attention written out plainly in its dtype a back end may be."""


class Errors(NamedTuple):
    """Largest differences from attention in float64; NaN counts as infinitely far."""

    found: float
    plain: float
    """Of attention written out plainly, in the back end's dtype."""

    least: float = 0.0
    """May always be off by this, which is what another order of a float32 sum makes."""

    @property
    def allowed(self) -> float:
        """How far off the back end may be."""
        return max(ALLOWED_RATIO * self.plain, self.least)

    @property
    def is_within(self) -> bool:
        """Whether the back end is not further off than it may be."""
        return self.found <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a case."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @classmethod
    def of(cls, heads: tuple[int, int, int], block_size: int) -> "Shape":
        """Return the shape of (query heads, KV heads, head dimension)."""
        num_heads, num_kv_heads, head_dim = heads
        return cls(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sequences, one a slot: decode slots first, then those with chunks."""

    shape: Shape
    decode_lengths: tuple[int, ...]
    """Tokens each decode row attends to, itself included."""
    chunks: tuple[tuple[int, int], ...]
    """(start, count) of each chunk."""
    layers: tuple[LayerAttention, ...]
    """Layers of the same contents, which the step goes through in turn."""
    has_sinks: bool
    """Every head attends to a sink too."""
    seed: int

    @property
    def ends(self) -> tuple[int, ...]:
        """Length of every sequence after the step."""
        return (*self.decode_lengths, *(start + count for start, count in self.chunks))

    @property
    def starts(self) -> tuple[int, ...]:
        """Length of every sequence before the step."""
        return (*(length - 1 for length in self.decode_lengths), *(s for s, _ in self.chunks))


def random_case(
    shape: Shape,
    *,
    num_decode: int,
    num_chunks: int,
    max_len: int,
    seed: int,
    windows: Sequence[int | None] = (None,),
    scale: float | None = None,
    has_sinks: bool = False,
) -> Case:
    """Return a case with lengths at, before and after block boundaries, and in between.

    It has a layer for each of the windows; scores are scaled as usual unless it is said how.
    """
    random = np.random.default_rng(seed)

    def length() -> int:
        boundary = shape.block_size * int(random.integers(1, max(2, max_len // shape.block_size)))
        near = boundary + int(random.integers(-1, 2))
        return min(
            max_len, max(1, near if random.random() < 0.5 else int(random.integers(1, max_len)))
        )

    decode = tuple(length() for _ in range(num_decode))
    chunks = []
    for index in range(num_chunks):
        end = length()
        start = 0 if index % 3 == 0 else int(random.integers(0, end))
        chunks.append((start, end - start))
    how = usual(shape.head_dim) if scale is None else LayerAttention(scale, None)
    return Case(
        shape=shape,
        decode_lengths=decode,
        chunks=tuple(chunks),
        layers=tuple(replace(how, window=window) for window in windows),
        has_sinks=has_sinks,
        seed=seed,
    )


def usual(head_dim: int) -> LayerAttention:
    """Return how most layers attend: to all, with scores over the root of the head's size."""
    return LayerAttention(head_dim**-0.5, None)


def largest_errors(
    case: Case,
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    as_graph: bool = False,
    is_fp8: bool = False,
) -> Errors:
    """Return how far a back end is off at most, in the layer where that is worst.

    With `as_graph`, rows go the way a CUDA graph's do, with padding behind them; with `is_fp8` the
    cache is in fp8.
    """
    generator = torch.Generator(device).manual_seed(case.seed)
    shape = case.shape

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    computed = [random(end, 2, shape.num_kv_heads, shape.head_dim) for end in case.ends]
    contents = [round_to_e4m3(c).to(dtype) for c in computed] if is_fp8 else computed
    queries = [
        random(end - start, shape.num_heads, shape.head_dim)
        for start, end in zip(case.starts, case.ends, strict=True)
    ]
    kv_dtype = E4M3 if is_fp8 else dtype
    cache, tables = _written_cache(case, name, contents, dtype=kv_dtype, device=device)
    sinks = random(shape.num_heads).float() if case.has_sinks else None
    attention = build_attention(name, cache, shape.num_heads, case.layers, dtype)
    fresh = torch.cat([c[start:] for c, start in zip(computed, case.starts, strict=True)])
    query = torch.cat(queries)
    if as_graph:
        assert isinstance(attention, PagedAttention), "only paged back ends can be captured"
        step, padding = _graph_step(case, attention, cache, tables)
        query = torch.cat((query, query.new_ones(padding, *query.shape[1:])))
        fresh = torch.cat((fresh, fresh.new_ones(padding, *fresh.shape[1:])))
    else:
        step = attention.start_step(_batch(case, cache, tables))
    num_rows = sum(map(len, queries))
    plainly = _attention_in_fp8 if is_fp8 and name in COMPUTE_IN_FP8 else plain_attention
    errors = []
    for layer, how in enumerate(case.layers):
        output = step.attend(layer, unrotated(query, fresh, sinks))[:num_rows]
        exact, plain = (
            torch.cat(
                [
                    attend(q, c, start, computed_in, how=how, sinks=sinks)
                    for q, c, start in zip(queries, contents, case.starts, strict=True)
                ]
            )
            for attend, computed_in in ((plain_attention, torch.float64), (plainly, dtype))
        )
        errors.append(
            Errors(
                found=_largest_difference(output, exact),
                plain=_largest_difference(plain, exact),
                least=4 * torch.finfo(dtype).eps if dtype == torch.float32 else 0.0,
            )
        )
    return max(errors, key=lambda layer: layer.found - layer.allowed)


def unrotated(query: Tensor, key_value: Tensor, sinks: Tensor | None = None) -> ProjectedHeads:
    """Return heads that are as they should be. [rows, heads, d], [rows, 2, kv_heads, d]"""
    cos = query.new_ones(len(query), 1, query.shape[2])
    return ProjectedHeads(
        heads=torch.cat((query, key_value.flatten(1, 2)), dim=1),
        num_heads=query.shape[1],
        num_kv_heads=key_value.shape[2],
        head_norm=None,
        rotation=Rotation(cos, torch.zeros_like(cos)),
        sinks=sinks,
    )


def plain_attention(
    query: Tensor,
    contents: Tensor,
    start: int,
    dtype: torch.dtype = torch.float32,
    *,
    how: LayerAttention | None = None,
    sinks: Tensor | None = None,
    round_weights: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> Tensor:
    """Attend from positions `start` on, all in `dtype`. [n, heads, d], [end, 2, kv_heads, d]"""
    how = how or usual(query.shape[2])
    groups = query.shape[1] // contents.shape[2]
    keys, values = contents.to(dtype).repeat_interleave(groups, dim=2).permute(1, 2, 0, 3)
    scores = query.to(dtype).transpose(0, 1) @ keys.transpose(1, 2) * how.scale
    positions = torch.arange(len(contents), device=query.device)
    before = positions[start:, None] - positions
    is_hidden = before < 0
    if how.window is not None:
        is_hidden |= before >= how.window
    scores.masked_fill_(is_hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.to(dtype)[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, sink), dim=2)
    weights = scores.softmax(-1)[:, :, : len(contents)]
    attended: Tensor = (round_weights(weights) @ values).transpose(0, 1).flatten(1)
    return attended


def _attention_in_fp8(
    query: Tensor,
    contents: Tensor,
    start: int,
    dtype: torch.dtype,
    *,
    how: LayerAttention,
    sinks: Tensor | None,
) -> Tensor:
    """Attend as above, with queries and weights rounded to e4m3."""

    def rounded(weights: Tensor) -> Tensor:
        # They are rounded before they are divided by their sum, when the largest is some 2^n.
        scale = 256 / weights.amax(dim=2, keepdim=True)
        return (weights * scale).to(E4M3).to(dtype) / scale

    query = round_to_e4m3(query).to(dtype)
    return plain_attention(
        query, contents, start, dtype, how=how, sinks=sinks, round_weights=rounded
    )


def _largest_difference(output: Tensor, exact: Tensor) -> float:
    return float((output.double() - exact).abs().max().nan_to_num(float("inf")))


def _written_cache(
    case: Case, name: str, contents: list[Tensor], *, dtype: torch.dtype, device: torch.device
) -> tuple[KVCache, Int32Array]:
    """Return a cache with everything before the step in it, and the slots' block tables."""
    size = case.shape.block_size
    shape = KVCacheShape(
        num_layers=len(case.layers),
        num_kv_heads=case.shape.num_kv_heads,
        head_dim=case.shape.head_dim,
        block_size=size,
    )
    counts = [-(-end // size) for end in case.ends]
    layout = AttentionChoice(name=name, reason="").layout
    cache = KVCache(shape, sum(counts) + 3, dtype=dtype, device=device, layout=layout)
    if layout is KVLayout.HEADS_FIRST:  # this layout's back end clears what it opens
        cache.data.fill_(float("nan"))
    elif dtype == E4M3:
        keys, values = cache.data.unbind(1)
        keys.fill_(float("nan"))
        values.fill_(torch.finfo(E4M3).max)
    else:
        cache.data.fill_(1e4)
    cache.clear_blocks([cache.pad_block])
    blocks = np.random.default_rng(case.seed).permutation(cache.num_blocks).astype(np.int32)
    tables = np.full((len(counts), max(counts) + 2), -1, dtype=np.int32)
    first = 0
    for slot, count in enumerate(counts):
        tables[slot, :count] = blocks[first : first + count]
        first += count
        _write(
            cache, torch.from_numpy(tables[slot]).to(device), contents[slot][: case.starts[slot]]
        )
    return cache, tables


def _write(cache: KVCache, table: Tensor, tokens: Tensor) -> None:
    """Put a sequence's tokens, [n, 2, kv_heads, head_dim], into every layer of the cache."""
    size = cache.shape.block_size
    positions = torch.arange(len(tokens), device=tokens.device)
    blocks, offsets = table[positions // size].long(), positions % size
    data = cache.data
    if data.dtype == E4M3:
        tokens, data = tokens.to(E4M3).view(torch.uint8), data.view(torch.uint8)
    if cache.layout is KVLayout.HEADS_FIRST:
        # This layout's back end has cleared a block when it began to fill it.
        cache.clear_blocks(set(blocks.tolist()))
        data[:, :, :, blocks, offsets] = tokens.permute(1, 2, 0, 3)
    else:
        data[:, :, blocks, offsets] = tokens.transpose(0, 1)


def _step_rows(case: Case) -> StepRows:
    num_decode = len(case.decode_lengths)
    decode = np.arange(num_decode, dtype=np.int32)
    chunks = tuple(
        Chunk(
            row=num_decode + index,
            slot=num_decode + index,
            start=start,
            token_ids=np.zeros(count, dtype=np.int32),
            is_last=True,
        )
        for index, (start, count) in enumerate(case.chunks)
    )
    nothing = int32_view(b"")
    return StepRows(
        step_id=1,
        num_rows=num_decode + len(chunks),
        leaves=nothing,
        joins=(),
        swap_outs=nothing.reshape(0, 2),
        swap_ins=nothing.reshape(0, 2),
        copies=nothing.reshape(0, 2),
        new_blocks=nothing.reshape(0, 3),
        decode_rows=decode,
        decode_slots=decode,
        decode_positions=np.array(case.decode_lengths, dtype=np.int32) - np.int32(1),
        chunks=chunks,
        failures={},
    )


def _batch(case: Case, cache: KVCache, tables: Int32Array) -> ForwardBatch:
    device = cache.data.device
    builder = BatchBuilder(
        block_size=case.shape.block_size, pad_block=cache.pad_block, min_rows=1, device=device
    )
    last_tokens = torch.zeros(len(tables), dtype=torch.int64, device=device)
    return builder.build(_step_rows(case), tables, last_tokens)


def _graph_step(
    case: Case, attention: PagedAttention, cache: KVCache, tables: Int32Array
) -> tuple[StepAttention, int]:
    """Return a step as a graph has it, and its padding rows."""
    num_decode, num_sequences = len(case.decode_lengths), len(case.ends)
    state = SlotTables(
        torch.zeros(num_sequences + 1, dtype=torch.int64, device=cache.data.device),
        max_blocks=tables.shape[1],
        block_size=case.shape.block_size,
        pad_block=cache.pad_block,
    )
    state.set_blocks([(slot, 0, table[table >= 0]) for slot, table in enumerate(tables)])
    if case.chunks:
        batch = _batch(case, cache, tables)
        padding = 5
        num_tokens, max_sequences = batch.num_tokens + padding, num_sequences + 2
        chunks = ChunkInputs(state, max_tokens=num_tokens, max_sequences=max_sequences)
        cache_positions = batch.cache_positions.cpu().numpy()
        chunks.fill(num_tokens, max_sequences, 0, _step_rows(case), cache_positions)
        columns = chunks.open(num_tokens, max_sequences)
        return attention.start_chunks(columns.chunks, columns.cache_positions), padding
    padding = 3
    inputs = DecodeInputs(state, max_rows=num_decode + padding)
    positions = np.array(case.decode_lengths, dtype=np.int32) - np.int32(1)
    inputs.fill(num_decode + padding, 0, np.arange(num_decode, dtype=np.int32), positions)
    rows = inputs.open(num_decode + padding)
    decode = DecodeRows(
        cache_positions=rows.cache_positions, lengths=rows.lengths, block_tables=rows.block_tables
    )
    return attention.start_decode(decode), padding

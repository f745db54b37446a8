"""What a model asks of attention, and what a worker asks of a back end.

A back end is built once over the KV cache. For each step it makes a `StepAttention`, which holds
whatever all layers of that step share: indices, masks, a kernel's metadata. A model sees only
that, so it knows neither blocks nor the mix of decode rows and chunks.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.batch import ChunkBatch, ForwardBatch
from worker.layers.head_norm import HeadNorm
from worker.layers.rotary import Rotation


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends; known when a back end is built."""

    scale: float
    """What products of queries and keys are multiplied by before the softmax."""
    window: int | None
    """How many tokens a row sees, itself included, the newest ones; None: its whole context."""

    def __post_init__(self) -> None:
        assert self.window is None or self.window >= 1, "a row sees itself at least"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedHeads:
    """One layer's queries, keys and values as their product made them, and what is still to do.

    Queries and keys are to be normalised and rotated in place, where the model does that. It is
    left to the back end because it can be one with the write to the cache.
    """

    heads: Tensor
    """[rows, heads + 2 · kv_heads, head_dim]: queries, keys, values; contiguous."""
    num_heads: int
    num_kv_heads: int
    head_norm: HeadNorm | None
    rotation: Rotation | None
    """None: this layer does not rotate."""
    sinks: Tensor | None = None
    """[heads] float32, or None: one more logit a query head in the softmax's denominator, of no
    value. Weights then add up to less than 1: a head can attend to nothing much."""

    @property
    def query(self) -> Tensor:
        """[rows, heads, head_dim]"""
        return self.heads[:, : self.num_heads]

    @property
    def key_value(self) -> Tensor:
        """[rows, 2, kv_heads, head_dim]"""
        rows, _, head_dim = self.heads.shape
        return self.heads[:, self.num_heads :].view(rows, 2, self.num_kv_heads, head_dim)

    def finish_(self) -> None:
        """Normalise and rotate queries and keys by torch's operators."""
        rotated = self.heads[:, : self.num_heads + self.num_kv_heads]
        if self.head_norm is not None:
            self.head_norm.normalize_(rotated)
        if self.rotation is not None:
            self.rotation.turn_(rotated)


class StepAttention(Protocol):
    """Attention of one step's rows, for every layer in turn."""

    def attend(self, layer: int, projected: ProjectedHeads) -> Tensor:
        """Finish queries and keys, store keys and values, attend to everything before each row.

        Returns [rows, heads · head_dim], valid until the next call. The cache of the layer must be
        written in step order and on one stream.
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute attention over the paged KV cache it was built with."""

    def start_step(self, batch: ForwardBatch) -> StepAttention:
        """Prepare what all layers of a step share."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """Decode rows as a CUDA graph sees them: everything on the device, nothing known to the host.

    A row that only fills up the batch has length 0 and the pad block's first cache position.
    """

    cache_positions: Tensor
    """[rows] int64, where each row's key and value go."""
    lengths: Tensor
    """[rows] int32, tokens each row attends to, itself included."""
    block_tables: Tensor
    """[rows, blocks] int32; what lies past a row's length is never read."""


class GraphableBackend(AttentionBackend, Protocol):
    """A back end that does the same work on the host whatever the rows hold."""

    def start_decode(self, rows: DecodeRows) -> StepAttention:
        """Prepare a step of decode rows only. All of it may be captured in a graph."""
        ...

    def start_chunks(self, chunks: ChunkBatch, cache_positions: Tensor) -> StepAttention:
        """Prepare a step of chunks only, of which every row is one's. It may be captured too.

        `cache_positions` [rows] int64 are where each row's key and value go.
        """
        ...

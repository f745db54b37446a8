"""What a model asks of attention, and what a worker asks of a back end.

A back end is built once over the KV cache. For each step it makes a `StepAttention`, which holds
whatever all layers of that step share: indices, masks, a kernel's metadata. A model sees only
that, so it knows neither blocks nor the mix of decode rows and chunks.
"""

from typing import Protocol

from torch import Tensor

from worker.batch import ForwardBatch


class StepAttention(Protocol):
    """Attention of one step's rows, for every layer in turn."""

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Store this step's keys and values, then attend to everything before each row.

        `query` is [rows, heads, head_dim], rotated; `key_value` is [rows, 2, kv_heads, head_dim],
        rotated keys, then values; returns [rows, heads · head_dim], valid until the next call.
        The cache of the layer must be written in step order and on one stream.
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute attention over the paged KV cache it was built with."""

    def start_step(self, batch: ForwardBatch) -> StepAttention:
        """Prepare what all layers of a step share."""
        ...

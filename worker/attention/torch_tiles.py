"""Attention of one chunk by torch's operators, in tiles of queries so that masks stay small.

Aligned at its lower right corner, one mask serves every tile:

                 keys up to the tile's last query
    ┌───────────────────────────────────────────────┐
    │ · · · 0 0 0 0 0 0 0 0 0 0 0 0 0 0 · · · · · · │
    │ · · · · 0 0 0 0 0 0 0 0 0 0 0 0 0 0 · · · · · │   0: seen, ·: -inf; on the left
    │ · · · · · 0 0 0 0 0 0 0 0 0 0 0 0 0 0 · · · · │   it is hidden by the window, if any
    └───────────────────────────────────────────────┘

A sink (`worker.attention.base.ProjectedHeads`) is a further column of scores, which the product
with values leaves out.
"""

import contextlib

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from worker.attention.base import LayerAttention

_TILE_ROWS = 512
"""Queries of a chunk that attend at once."""
_LEAST_ROWS = 64
"""Of a tile, however short the window: below, operators cost more than what they compute."""
_MAX_SCORES = 1 << 24
"""Scores written out at once where there are sinks, unless one query has more."""


class TileMasks:
    """Masks of tiles for every window: they grow as they are needed, and are kept."""

    def __init__(self, like: Tensor) -> None:
        """Make masks of the dtype and on the device of `like`."""
        self._like = like
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None, num_queries: int, num_keys: int) -> Tensor:
        """Return 0 where a query sees a key, else -inf, of which the last ones are each other's.

        [num_queries, num_keys], of at most `_TILE_ROWS` queries.
        """
        mask = self._masks.get(window)
        if mask is None or mask.shape[1] < num_keys:
            mask = self._masks[window] = self._make(window, num_keys)
        return mask[_TILE_ROWS - num_queries :, mask.shape[1] - num_keys :]

    def _make(self, window: int | None, width: int) -> Tensor:
        own = width - _TILE_ROWS
        """The diagonal on which a query meets its own key."""
        mask = self._like.new_full((_TILE_ROWS, width), float("-inf")).triu_(own + 1)
        if window is not None:
            is_before = torch.ones_like(mask, dtype=torch.bool).tril_(own - window)
            mask.masked_fill_(is_before, float("-inf"))
        return mask


def attend_fresh(
    query: Tensor,
    key_value: Tensor,
    target: Tensor,
    how: LayerAttention,
    sinks: Tensor | None,
    masks: TileMasks,
) -> None:
    """Attend a chunk that starts its sequence: it needs nothing but itself.

    `query` and `target` are [count, heads, head_dim], `key_value` [count, 2, kv_heads, head_dim].
    """
    keys, values = key_value.permute(1, 2, 0, 3)
    is_windowed = how.window is not None and how.window < len(query)
    if is_windowed or sinks is not None:
        attend_tiles(query, keys, values, target, how, sinks, masks, start=0, first_key=0)
        return
    attended = _scaled_dot_product(query, keys, values, how.scale, mask=None)
    target.copy_(attended.transpose(0, 1))


def attend_tiles(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    target: Tensor,
    how: LayerAttention,
    sinks: Tensor | None,
    masks: TileMasks,
    *,
    start: int,
    first_key: int,
) -> None:
    """Attend a chunk, [count, heads, head_dim], that begins at position `start`.

    `keys` and `values`, [kv_heads, n, head_dim], are those of the positions from `first_key` on, as
    far back as the window needs.
    """
    count = len(query)
    size = _TILE_ROWS
    if how.window is not None:
        # Of a tile as tall as the window half is seen, of a taller one less.
        size = min(size, max(how.window, _LEAST_ROWS))
    if sinks is not None:
        size = max(1, min(size, _MAX_SCORES // (query.shape[1] * keys.shape[1])))
    # The last tile sees most: from it on the mask need not grow.
    for first in reversed(range(0, count, size)):
        last = min(first + size, count)
        end = start + last - first_key
        begin = 0 if how.window is None else max(0, start + first + 1 - how.window - first_key)
        mask = masks.mask(how.window, last - first, end - begin)
        seen = slice(begin, end)
        if sinks is None:
            attended = _scaled_dot_product(
                query[first:last], keys[:, seen], values[:, seen], how.scale, mask=mask
            )
        else:
            attended = _written_out(
                query[first:last], keys[:, seen], values[:, seen], how.scale, mask, sinks
            )
        target[first:last] = attended.transpose(0, 1)


def softmax_beside_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Return weights of scores [..., rows, keys] beside one more score of each row.

    `sinks` broadcast to [..., rows, 1]. Weights of a row and its sink's, which is left out, add up
    to 1.
    """
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def _scaled_dot_product(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, mask: Tensor | None
) -> Tensor:
    """Attend through a mask, or causally without one.

    [n, heads, head_dim], [kv_heads, keys, head_dim] twice -> [heads, n, head_dim]
    """
    with contextlib.ExitStack() as stack:
        if query.is_cuda:
            # torch's fused CUDA kernels want masks and rows aligned to 16 bytes, and fault on ours.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
    return attended[0]


def _written_out(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor, sinks: Tensor
) -> Tensor:
    """Attend beside sinks, which torch's own operator does not know. Shapes as above."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, num_keys = keys.shape[:2]
    group = num_heads // num_kv_heads
    # The query heads of a KV head are rows of one product.
    rows = query.transpose(0, 1).reshape(num_kv_heads, group * num_queries, head_dim)
    scores = torch.bmm(rows, keys.transpose(1, 2)).view(-1, num_queries, num_keys)
    torch.add(mask, scores, alpha=scale, out=scores)
    weights = softmax_beside_sinks(scores, sinks.view(-1, 1, 1))
    attended = torch.bmm(weights.view(num_kv_heads, group, num_queries, -1).flatten(1, 2), values)
    return attended.view(query.transpose(0, 1).shape)

"""Queries and keys finished, keys and values written to the cache, in one launch a layer."""

from torch import Tensor

from worker.attention.base import ProjectedHeads
from worker.attention.paged import LayerCache
from worker.kernels.heads import prepare_heads


def write_fused(projected: ProjectedHeads, cache: LayerCache, cache_positions: Tensor) -> None:
    """`KVWriter` of a GPU."""
    norm, rotation = projected.head_norm, projected.rotation
    prepare_heads(
        projected.heads,
        None if rotation is None else rotation.cos,
        None if rotation is None else rotation.sin,
        num_heads=projected.num_heads,
        num_kv_heads=projected.num_kv_heads,
        query_weight=None if norm is None else norm.gain[0],
        key_weight=None if norm is None else norm.gain[1],
        eps=0.0 if norm is None else norm.eps,
        keys=cache.keys,
        values=cache.values,
        cache_positions=cache_positions,
    )

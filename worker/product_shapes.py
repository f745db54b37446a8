"""The matrix products of a model, without the model: what a rank multiplies, by what shape.

Imports no torch.
"""

from dataclasses import dataclass

from worker.model_config import ModelConfig
from worker.shard import divide, divide_heads, divide_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """The sizes of a model that its products follow from."""

    hidden: int
    intermediate: int
    """0 without a feed-forward block that is no expert"""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class ProductShape:
    """One kind of product of one rank: y = x · weightᵀ with weight [outputs, inputs]."""

    name: str
    """As in the model: qkv, output, gate_up, down or head."""
    outputs: int
    inputs: int


def config_sizes(config: ModelConfig) -> DecoderSizes:
    """Return the sizes of a model."""
    return DecoderSizes(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size if config.num_dense_layers() else 0,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
    )


def rank_products(sizes: DecoderSizes, *, tp: int, rank: int = 0) -> tuple[ProductShape, ...]:
    """Return a rank's products in the order of a step. `tp` must divide what is divided."""
    heads = divide_heads(sizes.heads, sizes.kv_heads, rank=rank, size=tp)
    part = divide(sizes.intermediate, rank=rank, size=tp).size
    vocabulary = divide_vocabulary(sizes.vocabulary, rank=rank, size=tp)
    query, key_value = heads.query.size, heads.key_value.size
    feed_forward = (
        ProductShape("gate_up", 2 * part, sizes.hidden),
        ProductShape("down", sizes.hidden, part),
    )
    return (
        ProductShape("qkv", (query + 2 * key_value) * sizes.head_dim, sizes.hidden),
        ProductShape("output", sizes.hidden, query * sizes.head_dim),
        *(feed_forward if part else ()),
        ProductShape("head", vocabulary.ids.size, sizes.hidden),
    )

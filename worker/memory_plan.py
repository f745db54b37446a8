"""What a GPU's memory goes to, and how many KV blocks are left. Pure arithmetic, without torch.

    total · utilization  =  weights + workspace + driver  +  graphs  +  KV cache
                                                                        the rest

Before anything is loaded the parts are estimated from the model's sizes (`estimate_memory`);
a rank that has loaded its weights and run a worst step puts what it measured in their place.
"""

from dataclasses import dataclass

from protocol.errors import ConfigError, ModelFileError
from protocol.messages import (
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
)
from worker.graph_sizes import max_num_graphs
from worker.model_config import ModelConfig
from worker.product_shapes import config_sizes, rank_products
from worker.quantization import Storage, bytes_saved, choose_storage
from worker.shard import divide_heads, divide_vocabulary

_MIB = 1 << 20
DEFAULT_NUM_SEQS = {"cuda": 256, "cpu": 64}
"""Of `--max-num-seqs`, by device."""
DEFAULT_BLOCK_SIZE = 64
"""On a GPU, but for flash-attn alone."""
GRAPH_BYTES = 12 * _MIB
"""What the driver keeps of one captured step of a few hundred kernels."""
GRAPH_POOL_BYTES = 256 * _MIB
"""Activations of the largest captured step, all but its logits."""
LOGIT_BYTES = 4
"""Logits are float32 on a GPU, whatever the model's dtype."""
EDIT_BYTES = (2 * MAX_LOGIT_BIASES + MAX_STOP_TOKEN_IDS + MAX_BAD_WORD_TOKENS - 1) * 4 + (
    MAX_BAD_WORD_IDS * MAX_BAD_WORD_TOKENS * 4 + 4 * 4 + 8
)
"""Of a slot, for edits of logits, beside what is as wide as the vocabulary."""
DRIVER_BYTES = 600 * _MIB
"""A CUDA context and the code of its kernels, estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one GPU."""

    total: int
    utilization: float
    """The part of the total that may be used."""
    weights: int
    workspace: int
    """A worst step's tensors."""
    other: int
    """The driver, and whatever else there is: other processes too."""
    graphs: int
    """Reserved for captured steps."""
    block_bytes: int
    """Of one KV block over all layers."""

    @property
    def kv_cache(self) -> int:
        """What is left for the KV cache; below 0 where the rest does not fit."""
        used = self.weights + self.workspace + self.other + self.graphs
        return int(self.total * self.utilization) - used

    @property
    def num_blocks(self) -> int:
        """Return how many blocks fit. Raises ConfigError, with the parts, if that is not one."""
        if self.kv_cache < self.block_bytes:
            raise ConfigError(
                f"No room is left for the KV cache: of {_gib(self.total)} GPU memory "
                f"--gpu-memory-utilization {self.utilization:g} allows "
                f"{_gib(int(self.total * self.utilization))}; weights take {_gib(self.weights)}, a "
                f"step's tensors {_gib(self.workspace)}, CUDA graphs {_gib(self.graphs)}, driver "
                f"and others {_gib(self.other)}; a block needs {_gib(self.block_bytes)}. Raise "
                "it, lower --max-num-batched-tokens or --max-num-seqs, or use more GPUs (--tp)."
            )
        return self.kv_cache // self.block_bytes

    def table(self) -> str:
        """Return the parts as lines, each with the flag that changes it."""
        rows = (
            ("weights", self.weights, "--dtype, --quantization, --tp"),
            ("step's tensors", self.workspace, "--max-num-batched-tokens"),
            ("CUDA graphs", self.graphs, "--max-num-seqs, --enforce-eager"),
            ("driver and others", self.other, ""),
            (
                "KV cache",
                max(0, self.kv_cache),
                "--num-blocks, --gpu-memory-utilization, --kv-cache-dtype",
            ),
            ("left free", self.total - int(self.total * self.utilization), ""),
        )
        return "\n".join(
            f"{name:<18} {_gib(size):>12}  {flags}".rstrip() for name, size, flags in rows
        )


def edit_state_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Return the bytes of what is kept for edits of logits (`worker.logit_edits.EditTensors`)."""
    token_bytes = 2 * vocab_size + 2 * 4 * -(-vocab_size // 32)  # a count and two masks
    return (max_num_seqs + 1) * (token_bytes + EDIT_BYTES)


def graph_reserve(num_graphs: int, max_rows: int, vocab_size: int) -> int:
    """Return the bytes to keep for graphs of up to `max_rows` rows; 0 without graphs."""
    if not num_graphs:
        return 0
    logits = 2 * max_rows * vocab_size * LOGIT_BYTES  # as the model made them, and edited
    return GRAPH_POOL_BYTES + num_graphs * GRAPH_BYTES + logits


def weight_count(model: ModelConfig, *, tp: int) -> int:
    """Return how many numbers rank 0 of `tp`, which has the most, holds."""
    heads = divide_heads(model.num_heads, model.num_kv_heads, rank=0, size=tp)
    vocabulary = divide_vocabulary(model.vocab_size, rank=0, size=tp)
    hidden = model.hidden_size
    query, key_value = heads.query.size * model.head_dim, heads.key_value.size * model.head_dim
    layer = hidden * (2 * query + 2 * key_value + model.num_norms)
    if model.qkv_bias:
        layer += query + 2 * key_value
    if model.output_bias:
        layer += hidden
    if model.has_sinks:
        layer += heads.query.size
    match model.query_key_norm:
        case "head":
            layer += 2 * model.head_dim
        case "projection":
            layer += query + key_value
        case None:
            pass
    head = 0 if model.tie_word_embeddings else vocabulary.ids.size * hidden
    blocks = _block_weights(model, tp=tp)
    return model.vocab_size * hidden + model.num_layers * layer + blocks + hidden + head


def _block_weights(model: ModelConfig, *, tp: int) -> int:
    """Return how many numbers the feed-forward blocks and experts of all layers have."""
    hidden, inner = model.hidden_size, model.intermediate_size // tp
    count = model.num_dense_layers() * (
        3 * hidden * inner + (2 * inner + hidden if model.mlp_bias else 0)
    )
    experts = model.experts
    if experts is None:
        return count
    inner = experts.intermediate_size // tp
    one = hidden + 3 * hidden * inner  # its row of the router, its projections
    if experts.has_bias:
        one += 1 + 2 * inner + hidden
    return count + sum(experts.layers) * experts.num_experts * one


def weight_bytes(model: ModelConfig, *, tp: int, item_bytes: int, storage: Storage) -> int:
    """Return the bytes of rank 0's weights, `item_bytes` a number where they are not quantised."""
    products = rank_products(config_sizes(model), tp=tp)
    dense = model.num_dense_layers()
    layers = {"qkv": model.num_layers, "output": model.num_layers, "gate_up": dense, "down": dense}
    saved = sum(
        layers.get(shape.name, 0) * bytes_saved(storage, shape, item_bytes, model.quantization)
        for shape in products
    )
    return weight_count(model, tp=tp) * item_bytes - saved


def require_weights_fit(
    model: ModelConfig, *, tp: int, item_bytes: int, storage: Storage, available_bytes: int
) -> None:
    """Raise ModelFileError for sizes whose weights a rank has no memory for, before it asks for it.

    The system may promise such memory, and kill a process that takes it at its word.
    """
    needed = weight_bytes(model, tp=tp, item_bytes=item_bytes, storage=storage)
    if needed > available_bytes:
        raise ModelFileError(
            f"{model.source}: hidden_size {model.hidden_size}, intermediate_size "
            f"{model.intermediate_size}, num_hidden_layers {model.num_layers} and vocab_size "
            f"{model.vocab_size} make weights of {_gib(needed)} a rank, and there are "
            f"{_gib(available_bytes)} of memory"
        )


def estimate_memory(
    model: ModelConfig,
    *,
    tp: int,
    item_bytes: int,
    kv_item_bytes: int,
    block_size: int,
    total: int,
    utilization: float,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    num_graphs: int,
    storage: Storage = "none",
) -> MemoryPlan:
    """Return what rank 0 of `tp` will need, before anything is loaded.

    `item_bytes` are those of a number in the model's dtype, `kv_item_bytes` those of one in the KV
    cache, `storage` says how products keep their weights.
    """
    heads = divide_heads(model.num_heads, model.num_kv_heads, rank=0, size=tp)
    query, key_value = heads.query.size * model.head_dim, heads.key_value.size * model.head_dim
    # The feed-forward is where most is alive: residual, its input, gate and up, their product; or
    # for each expert of a token, its inner values and its part of the result.
    blocks = [2 * query + 2 * key_value]
    if model.num_dense_layers():
        blocks.append(3 * model.intermediate_size // tp)
    if model.experts is not None:
        one = model.experts.intermediate_size // tp + model.hidden_size
        blocks.append(model.experts.experts_per_token * one)
    per_token = 2 * model.hidden_size + max(blocks)
    tokens = max(max_num_batched_tokens, max_num_seqs)
    products = rank_products(config_sizes(model), tp=tp)[:-1]
    # A weight in 4 bits is multiplied out for many rows.
    largest = max(shape.outputs * shape.inputs for shape in products)
    scratch = largest * item_bytes if storage == "int4" else 0
    logits = 2 * max_num_seqs * model.vocab_size * LOGIT_BYTES
    logits += edit_state_bytes(max_num_seqs, model.vocab_size)
    return MemoryPlan(
        total=total,
        utilization=utilization,
        weights=weight_bytes(model, tp=tp, item_bytes=item_bytes, storage=storage),
        workspace=tokens * per_token * item_bytes + logits + scratch,
        other=DRIVER_BYTES,
        graphs=graph_reserve(num_graphs, max_num_seqs, model.vocab_size),
        block_bytes=2 * model.num_layers * key_value * block_size * kv_item_bytes,
    )


def memory_table(
    model: ModelConfig,
    *,
    tp: int,
    dtype: str,
    quantization: str,
    kv_cache_dtype: str,
    block_size: int | None,
    utilization: float,
    max_num_batched_tokens: int,
    max_num_seqs: int | None,
    has_graphs: bool,
    total: int,
) -> list[str]:
    """Return what a GPU of `total` bytes would hold, a line for each part and one for the tokens.

    The rest are the flags of these names, None where one is not given.
    """
    num_seqs = max_num_seqs or DEFAULT_NUM_SEQS["cuda"]
    positions = block_size or DEFAULT_BLOCK_SIZE
    item_bytes = 4 if (model.dtype if dtype == "auto" else dtype) == "float32" else 2
    plan = estimate_memory(
        model,
        tp=tp,
        item_bytes=item_bytes,
        kv_item_bytes=1 if kv_cache_dtype == "fp8" else item_bytes,
        block_size=positions,
        total=total,
        utilization=utilization,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=num_seqs,
        num_graphs=max_num_graphs(num_seqs) if has_graphs else 0,
        storage=choose_storage(quantization, model.quantization),
    )
    num_tokens = max(0, plan.kv_cache) // plan.block_bytes * positions
    return [*plan.table().splitlines(), f"{'tokens in cache':<18} {num_tokens:>12}"]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"

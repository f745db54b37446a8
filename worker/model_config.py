"""What a model is: its architecture and sizes, read from config.json or a GGUF header.

Imports no torch, so that processes which never compute can ask how long a context is or which
tokens end a text. Every value is checked here, once: whatever holds a `ModelConfig` may trust it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from protocol.errors import ConfigError, ModelFileError
from protocol.messages import MAX_MODEL_LEN
from worker.quantization_config import CheckpointQuantization
from worker.rope_config import RopeConfig

CheckpointDtype: TypeAlias = Literal["float32", "float16", "bfloat16"]


Activation: TypeAlias = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwigluClamp:
    """GPT-OSS' activation: gate · sigmoid(alpha · gate) · (up + 1).

    The gate is at most `limit`, up is within ± `limit`.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of a layer's feed-forward block."""

    layers: tuple[bool, ...]
    """Which layers have it, one entry a layer; the others have a feed-forward block."""
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    is_renormalised: bool
    """The weights of a token's experts add up to 1."""
    has_bias: bool = False
    """The router and the experts' projections have biases."""
    clamp: SwigluClamp | None = None
    """None: the activation is silu(gate) · up."""
    is_packed: bool = False
    """The checkpoint has the experts in MXFP4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's sizes and constants. Raises ModelFileError where `source` has an unusable value.

    What varies by layer is a tuple with one entry a layer.
    """

    source: Path
    """The file these values come from; error messages name it."""
    architecture: str
    """A key of `worker.models.ARCHITECTURES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    norm_offset: float
    """Norms scale by this + weight: 0 or, where weights are small numbers around 0, 1."""
    query_key_norm: Literal["head", "projection"] | None
    """Queries and keys are normalised before they are rotated: head by head, or all together."""
    num_norms: int
    """A layer's norms of `hidden_size` weights."""
    ropes: tuple[RopeConfig | None, ...]
    """How each layer turns queries and keys; None: it does not."""
    windows: tuple[int | None, ...]
    """How many tokens a row sees in each layer, itself included; None: its whole context."""
    attention_scale: float
    """What products of queries and keys are multiplied by before the softmax."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    """The output projection is the embedding table."""
    qkv_bias: bool
    """q, k and v have biases."""
    output_bias: bool
    """Attention's output projection has a bias."""
    mlp_bias: bool
    """gate, up and down have biases."""
    activation: Activation
    """Of the gate."""
    embedding_multiplier: float
    residual_multiplier: float
    """What attention and feed-forward add to the residual is multiplied by it."""
    logits_divisor: float
    experts: ExpertsConfig | None
    """None: every layer has one feed-forward block."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end an output, most usual first."""
    dtype: CheckpointDtype
    """What `--dtype auto` means on CUDA."""
    quantization: CheckpointQuantization | None = None
    """How the checkpoint's products are quantised; None: they are not, or it is a GGUF file."""
    has_sinks: bool = False
    """Every query head has a sink (`worker.attention.base.ProjectedHeads.sinks`)."""

    def __post_init__(self) -> None:
        self._require_range("vocab_size", self.vocab_size, 1, 1 << 22)
        self._require_range("hidden_size", self.hidden_size, 1, 1 << 17)
        self._require_range("intermediate_size", self.intermediate_size, 1, 1 << 20)
        self._require_range("num_hidden_layers", self.num_layers, 1, 1024)
        self._require_range("num_attention_heads", self.num_heads, 1, 4096)
        self._require_range("num_key_value_heads", self.num_kv_heads, 1, self.num_heads)
        self._require_range("head_dim", self.head_dim, 2, 1024)
        self._require_range("max_position_embeddings", self.max_position_embeddings, 1, 1 << 24)
        if self.num_heads % self.num_kv_heads:
            raise self._bad(
                "num_key_value_heads", self.num_kv_heads, f"a divisor of {self.num_heads}"
            )
        if self.head_dim % 2:
            raise self._bad("head_dim", self.head_dim, "even")
        if not 0.0 < self.rms_norm_eps < 1.0:
            raise self._bad("rms_norm_eps", self.rms_norm_eps, "above 0 and below 1")
        self._check_layers()
        self._check_experts()
        for name, factor in (
            ("attention scale", self.attention_scale),
            ("embedding multiplier", self.embedding_multiplier),
            ("residual multiplier", self.residual_multiplier),
            ("logits divisor", self.logits_divisor),
        ):
            # NaN compares false with everything, so this refuses it too.
            if not 0.0 < factor < math.inf:
                raise self._bad(name, factor, "a finite number above 0")
        for token_id in self.eos_token_ids:
            self._require_range("eos_token_id", token_id, 0, self.vocab_size - 1)
        if self.bos_token_id is not None:
            self._require_range("bos_token_id", self.bos_token_id, 0, self.vocab_size - 1)

    def legal_tp_sizes(self) -> tuple[int, ...]:
        """Return the numbers of tensor-parallel ranks that this model's heads and sizes allow.

        Query heads and the intermediate sizes must divide; KV heads divide, or are replicated when
        there are more ranks than heads.
        """
        inner_sizes = self._divided_sizes().values()
        return tuple(
            tp
            for tp in range(1, self.num_heads + 1)
            if self.num_heads % tp == 0
            and all(size % tp == 0 for size in inner_sizes)
            and (self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0)
        )

    def sequence_limit(self, asked: int | None) -> int:
        """Return the most tokens of a sequence: what was asked for, else what the model is for."""
        usual = [
            rope.usual_context(self.max_position_embeddings)
            for rope in dict.fromkeys(self.ropes)
            if rope is not None
        ]
        return asked or min(max([self.max_position_embeddings, *usual]), MAX_MODEL_LEN)

    def longest_context(self) -> int:
        """Return the most tokens that may be asked for: what the model or its RoPE is for."""
        longest = [
            rope.longest_context(self.max_position_embeddings)
            for rope in dict.fromkeys(self.ropes)
            if rope is not None
        ]
        return max([self.max_position_embeddings, *longest])

    def require_legal_tp(self, tp: int) -> None:
        """Raise ConfigError unless the model can be divided among `tp` ranks."""
        sizes = self.legal_tp_sizes()
        if tp not in sizes:
            inner = " and ".join(f"{name} {size}" for name, size in self._divided_sizes().items())
            raise ConfigError(
                f"--tp {tp} does not divide this model's {self.num_heads} query heads, "
                f"{self.num_kv_heads} KV heads and {inner}; "
                f"legal are {', '.join(map(str, sizes))}."
            )

    def num_dense_layers(self) -> int:
        """Return how many layers have a feed-forward block and no experts."""
        return self.num_layers - (0 if self.experts is None else sum(self.experts.layers))

    def _divided_sizes(self) -> dict[str, int]:
        """Return the sizes of blocks that the ranks divide, by what they are called."""
        sizes = {"intermediate size": self.intermediate_size} if self.num_dense_layers() else {}
        if self.experts is not None:
            sizes["the experts' intermediate size"] = self.experts.intermediate_size
        return sizes

    def _check_experts(self) -> None:
        experts = self.experts
        if experts is None:
            return
        assert len(experts.layers) == self.num_layers, "one entry a layer"
        self._require_range("number of experts", experts.num_experts, 1, 4096)
        self._require_range(
            "num_experts_per_tok", experts.experts_per_token, 1, experts.num_experts
        )
        self._require_range("moe_intermediate_size", experts.intermediate_size, 1, 1 << 20)
        if experts.clamp is not None and not 0.0 < experts.clamp.limit < math.inf:
            raise self._bad("swiglu_limit", experts.clamp.limit, "a finite number above 0")
        if not experts.is_packed:
            return
        for name, size in (
            ("hidden_size", self.hidden_size),
            ("intermediate_size", experts.intermediate_size),
        ):
            if size % 32:
                raise self._bad(name, size, "a multiple of 32, the numbers of an MXFP4 block")

    def _check_layers(self) -> None:
        assert len(self.ropes) == len(self.windows) == self.num_layers, "one entry a layer"
        for rope in dict.fromkeys(self.ropes):
            if rope is not None:
                rope.check(self.source, self.head_dim)
        for window in dict.fromkeys(self.windows):
            if window is not None:
                self._require_range("sliding_window", window, 1, 1 << 24)

    def _require_range(self, key: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            raise self._bad(key, value, f"{low} to {high}")

    def _bad(self, key: str, value: object, allowed: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {key} is {value}; it must be {allowed}")


def merge_token_ids(*groups: Iterable[int]) -> tuple[int, ...]:
    """Return the ids of all groups in order, each once."""
    return tuple(dict.fromkeys(token_id for group in groups for token_id in group))

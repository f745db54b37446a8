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

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Keys of `worker.models.ARCHITECTURES`, known here without importing torch."""

CheckpointDtype: TypeAlias = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths are stretched by `factor`, short ones kept, with a ramp."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorScaling:
    """Every frequency is divided by its own factor, as GGUF files store Llama 3.1's scaling."""

    factors: tuple[float, ...]
    """[head_dim / 2]"""


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | FactorScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's sizes and constants. Raises ModelFileError where `source` has an unusable value."""

    source: Path
    """The file these values come from; error messages name it."""
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    """The output projection is the embedding table."""
    attention_bias: bool
    """q, k, v and o have biases."""
    mlp_bias: bool
    """gate, up and down have biases."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end an output, most usual first."""
    dtype: CheckpointDtype
    """What `--dtype auto` means on CUDA."""
    quantization: CheckpointQuantization | None = None
    """How the checkpoint's products are quantised; None: they are not, or it is a GGUF file."""

    def __post_init__(self) -> None:
        if self.architecture not in SUPPORTED_ARCHITECTURES:
            raise ModelFileError(
                f"{self.source}: architecture {self.architecture} is not supported; supported: "
                f"{', '.join(SUPPORTED_ARCHITECTURES)}"
            )
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
        if not 1.0 <= self.rope_theta <= 1e12:
            raise self._bad("rope_theta", self.rope_theta, "1 to 1e12")
        self._check_scaling()
        for token_id in self.eos_token_ids:
            self._require_range("eos_token_id", token_id, 0, self.vocab_size - 1)
        if self.bos_token_id is not None:
            self._require_range("bos_token_id", self.bos_token_id, 0, self.vocab_size - 1)

    def legal_tp_sizes(self) -> tuple[int, ...]:
        """Return the numbers of tensor-parallel ranks that this model's heads and sizes allow.

        Query heads and the intermediate size must divide; KV heads divide, or are replicated when
        there are more ranks than heads.
        """
        return tuple(
            tp
            for tp in range(1, self.num_heads + 1)
            if self.num_heads % tp == 0
            and self.intermediate_size % tp == 0
            and (self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0)
        )

    def sequence_limit(self, asked: int | None) -> int:
        """Return the most tokens of a sequence: what was asked for, else what the model is for."""
        return asked or min(self.max_position_embeddings, MAX_MODEL_LEN)

    def require_legal_tp(self, tp: int) -> None:
        """Raise ConfigError unless the model can be divided among `tp` ranks."""
        sizes = self.legal_tp_sizes()
        if tp not in sizes:
            raise ConfigError(
                f"--tp {tp} does not divide this model's {self.num_heads} query heads, "
                f"{self.num_kv_heads} KV heads and intermediate size {self.intermediate_size}; "
                f"legal are {', '.join(map(str, sizes))}."
            )

    def _check_scaling(self) -> None:
        match self.rope_scaling:
            case None:
                pass
            case LinearScaling(factor=factor):
                self._require_factor("rope factor", factor)
            case Llama3Scaling() as scaling:
                self._require_factor("rope factor", scaling.factor)
                self._require_factor("rope high_freq_factor", scaling.high_freq_factor)
                if not 0.0 < scaling.low_freq_factor < scaling.high_freq_factor:
                    raise self._bad(
                        "rope low_freq_factor",
                        scaling.low_freq_factor,
                        f"above 0 and below high_freq_factor ({scaling.high_freq_factor})",
                    )
                self._require_range(
                    "rope original_max_position_embeddings",
                    scaling.original_max_position_embeddings,
                    1,
                    1 << 24,
                )
            case FactorScaling(factors=factors):
                if len(factors) != self.head_dim // 2:
                    raise self._bad("rope factors", len(factors), f"{self.head_dim // 2} numbers")
                for factor in factors:
                    self._require_factor("rope factor", factor)

    def _require_factor(self, key: str, value: float) -> None:
        # NaN compares false with everything, so this refuses it too.
        if not 0.0 < value < math.inf:
            raise self._bad(key, value, "a finite number above 0")

    def _require_range(self, key: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            raise self._bad(key, value, f"{low} to {high}")

    def _bad(self, key: str, value: object, allowed: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {key} is {value}; it must be {allowed}")


def merge_token_ids(*groups: Iterable[int]) -> tuple[int, ...]:
    """Return the ids of all groups in order, each once."""
    return tuple(dict.fromkeys(token_id for group in groups for token_id in group))

"""Llama: pre-norm decoder, rotary positions, grouped KV heads, gated feed-forward.

Queries, keys and values come from one product, as do gate and up; the residual is added inside
the norm that follows. Logits are computed only for rows that sample.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from worker.attention.base import StepAttention
from worker.layers.activation import silu_and_multiply
from worker.layers.embedding import Embedding
from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.layers.rotary import Rotary, Rotation
from worker.model_config import ModelConfig
from worker.weights import Weight, norm_weight, stacked_weights


class LlamaAttention(nn.Module):
    """Projections around attention."""

    def __init__(
        self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._layer = layer
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._num_rotated = config.num_heads + config.num_kv_heads
        num_heads = self._num_rotated + config.num_kv_heads
        self.qkv = Linear(
            config.hidden_size,
            num_heads * config.head_dim,
            bias=config.attention_bias,
            dtype=dtype,
            device=device,
        )
        self.output = Linear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            dtype=dtype,
            device=device,
        )

    def forward(self, hidden: Tensor, rotation: Rotation, attention: StepAttention) -> Tensor:
        """[rows, hidden] -> [rows, hidden]"""
        heads = self.qkv(hidden).view(len(hidden), -1, self._head_dim)
        rotation.turn_(heads[:, : self._num_rotated])
        query = heads[:, : self._num_heads]
        key_value = heads[:, self._num_heads :].unflatten(1, (2, self._num_kv_heads))
        projected: Tensor = self.output(attention.attend(self._layer, query, key_value))
        return projected

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        sizes = {
            f"{prefix}q_proj": self._num_heads * self._head_dim,
            f"{prefix}k_proj": self._num_kv_heads * self._head_dim,
            f"{prefix}v_proj": self._num_kv_heads * self._head_dim,
        }
        yield from stacked_weights(self.qkv, sizes)
        yield from stacked_weights(self.output, {f"{prefix}o_proj": len(self.output.weight)})


class LlamaFeedForward(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._size = config.intermediate_size
        self.gate_up = Linear(
            config.hidden_size,
            2 * config.intermediate_size,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )
        self.down = Linear(
            config.intermediate_size,
            config.hidden_size,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]"""
        projected: Tensor = self.down(silu_and_multiply(self.gate_up(hidden)))
        return projected

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        sizes = {f"{prefix}gate_proj": self._size, f"{prefix}up_proj": self._size}
        yield from stacked_weights(self.gate_up, sizes)
        yield from stacked_weights(self.down, {f"{prefix}down_proj": len(self.down.weight)})


class LlamaLayer(nn.Module):
    """Attention and feed-forward, each behind its norm."""

    def __init__(
        self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.attention = LlamaAttention(config, layer, dtype=dtype, device=device)
        self.feed_forward_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.feed_forward = LlamaFeedForward(config, dtype=dtype, device=device)

    def forward(
        self, delta: Tensor | None, residual: Tensor, rotation: Rotation, attention: StepAttention
    ) -> tuple[Tensor, Tensor]:
        """Return what this layer adds to the residual, and the residual it adds to.

        `delta` is what the previous layer has to add, None for the first. Both [rows, hidden].
        """
        if delta is None:
            normed = self.attention_norm(residual)
        else:
            normed, residual = self.attention_norm.add(delta, residual)
        delta = self.attention(normed, rotation, attention)
        normed, residual = self.feed_forward_norm.add(delta, residual)
        return self.feed_forward(normed), residual

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        yield norm_weight(self.attention_norm, f"{prefix}input_layernorm")
        yield from self.attention.weights(f"{prefix}self_attn.")
        yield norm_weight(self.feed_forward_norm, f"{prefix}post_attention_layernorm")
        yield from self.feed_forward.weights(f"{prefix}mlp.")


class LlamaForCausalLM(nn.Module):
    """The whole model on one rank. Its weights are empty until loaded (`weights`)."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.rotary = Rotary(
            config.head_dim,
            config.rope_theta,
            config.rope_scaling,
            max_positions=max_model_len,
            dtype=dtype,
            device=device,
        )
        self.layers = nn.ModuleList(
            LlamaLayer(config, layer, dtype=dtype, device=device)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.output = Linear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            dtype=dtype,
            device=device,
        )
        self._is_tied = config.tie_word_embeddings
        if self._is_tied:
            self.output.tie(self.embedding.weight)

    def forward(self, tokens: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """Compute hidden states before the last norm. [rows], [rows] -> [rows, hidden]"""
        rotation: Rotation = self.rotary(positions)
        residual: Tensor = self.embedding(tokens)
        delta: Tensor | None = None
        for layer in self.layers:
            delta, residual = layer(delta, residual, rotation, attention)
        assert delta is not None, "a model has at least one layer"
        return residual.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Score every token for chosen rows of `forward`'s result. [n, hidden] -> [n, vocab]"""
        scores: Tensor = self.output(self.norm(hidden))
        return scores

    def weights(self) -> Iterator[Weight]:
        """Yield every tensor the checkpoint must have, and where this rank wants it."""
        yield Weight(name="model.embed_tokens.weight", target=self.embedding.weight)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer)
            yield from layer.weights(f"model.layers.{index}.")
        yield norm_weight(self.norm, "model.norm")
        if not self._is_tied:
            yield Weight(name="lm_head.weight", target=self.output.weight)

    def ignored_weights(self) -> frozenset[str]:
        """Return names a checkpoint may have although the model does not need them."""
        return frozenset({"lm_head.weight"}) if self._is_tied else frozenset()

"""The decoder that Llama and Qwen3 share: pre-norm layers, rotary positions, gated feed-forward.

Models differ in what they hand in as attention (`worker.models.llama`, `worker.models.qwen3`). The
residual is added inside the norm that follows. Logits are computed only for rows that sample.

Of few rows the residual is float32, whatever the model's dtype: rounded to bfloat16 after each
layer's two additions, it is where most of the error of a token's logits comes from. Many rows
would pay for that in bandwidth; their products add to the residual in place (`Linear.add_to`).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from worker.attention.base import StepAttention
from worker.layers.embedding import Embedding
from worker.layers.linear import ADDS_FROM_ROWS
from worker.layers.norm import RMSNorm
from worker.layers.output_head import OutputHead
from worker.layers.rotary import Rotary, Rotation
from worker.model_config import ModelConfig
from worker.models.feed_forward import FeedForward
from worker.models.self_attention import SelfAttention
from worker.parallel import TensorParallel
from worker.shard import divide_vocabulary
from worker.weights import Weight, norm_weight, stacked_weights


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind its norm."""

    def __init__(
        self,
        config: ModelConfig,
        attention: SelfAttention,
        *,
        group: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.feed_forward = FeedForward(
            size,
            config.intermediate_size,
            bias=config.mlp_bias,
            group=group,
            dtype=dtype,
            device=device,
        )

    def forward(
        self,
        delta: Tensor | None,
        residual: Tensor,
        rotation: Rotation,
        attention: StepAttention,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Return what is still to be added to the residual, None if nothing is, and the residual.

        `delta` is the same of the layer before. Both [rows, hidden]; the results are those of the
        `wanted` rows, [n] int64, if not of all.
        """
        normed, residual = self.attention_norm.add(delta, residual)
        attended = self.attention(normed, rotation, attention)
        if wanted is not None:
            attended = attended.index_select(0, wanted)
            residual = residual.index_select(0, wanted)
        delta = self.attention.output.add(attended, residual)
        normed, residual = self.feed_forward_norm.add(delta, residual)
        return self.feed_forward(normed, residual), residual

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        yield norm_weight(self.attention_norm, f"{prefix}input_layernorm")
        yield from self.attention.weights(f"{prefix}self_attn.")
        yield norm_weight(self.feed_forward_norm, f"{prefix}post_attention_layernorm")
        yield from self.feed_forward.weights(f"{prefix}mlp.")


class CausalLM(nn.Module):
    """A whole model on one rank, given each layer's attention. Empty until loaded (`weights`)."""

    def __init__(
        self,
        config: ModelConfig,
        attentions: Sequence[SelfAttention],
        *,
        group: TensorParallel,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.rotary = Rotary(config.rope, max_positions=max_model_len, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, attention, group=group, dtype=dtype, device=device)
            for attention in attentions
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        vocabulary = divide_vocabulary(config.vocab_size, rank=group.rank, size=group.size)
        self.output = OutputHead(config.hidden_size, vocabulary, dtype=dtype, device=device)
        self._is_tied = config.tie_word_embeddings
        if self._is_tied:
            self.output.tie(self.embedding.weight)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Compute hidden states before the last norm. [rows], [rows] -> [rows, hidden]

        They are float32 where there are few rows, else of the model's dtype.

        With `wanted`, [n] int64, only those of these rows, [n, hidden]: once the last layer has
        attended, nobody needs the others, which in a step of long chunks are nearly all.
        """
        rotation: Rotation = self.rotary(positions)
        residual: Tensor = self.embedding(tokens)
        if len(tokens) < ADDS_FROM_ROWS:
            residual = residual.float()
        delta: Tensor | None = None
        *before, last = self.layers
        for layer in before:
            delta, residual = layer(delta, residual, rotation, attention)
        delta, residual = last(delta, residual, rotation, attention, wanted)
        return residual if delta is None else residual.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Score this rank's part of the vocabulary for chosen rows of `forward`'s result.

        [n, hidden] -> [n, width], the same width on every rank (`worker.shard.VocabularyShard`).
        """
        scores: Tensor = self.output(self.norm(hidden))
        return scores

    def weights(self) -> Iterator[Weight]:
        """Yield every tensor the checkpoint must have, and where this rank wants it."""
        yield Weight(name="model.embed_tokens.weight", target=self.embedding.weight)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.weights(f"model.layers.{index}.")
        yield norm_weight(self.norm, "model.norm")
        if not self._is_tied:
            yield from stacked_weights(self.output.product, {"lm_head": self.output.ids})

    def ignored_weights(self) -> frozenset[str]:
        """Return names a checkpoint may have although the model does not need them."""
        return frozenset({"lm_head.weight"}) if self._is_tied else frozenset()

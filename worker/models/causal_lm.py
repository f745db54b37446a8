"""A whole decoder: embedding, the layers that its family makes, last norm, logits.

What a new family must bring:

1. a reader of its config.json, and its name, in `worker.families`: every field that changes what
   is computed is read into `ModelConfig` or refused;
2. a builder, named in `worker.models`: that of Llama where `ModelConfig` says all that differs,
   else one in a module of its own, with a layer of its own if need be (`DecoderLayer`);
3. its row in tests/worker/models/families.py, which holds it to transformers and makes its line of
   docs/models.md;
4. its name and tensors in `worker.gguf_config` and `worker.gguf_weights`, if it has GGUF files.

Logits are computed only for rows that sample. Of few rows the residual is float32, whatever the
model's dtype: rounded to bfloat16 after each layer's two additions, it is where most of the error
of a token's logits comes from. Many rows would pay for that in bandwidth; their products add to the
residual in place (`Linear.add_to`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from worker.attention.base import StepAttention
from worker.layers.embedding import Embedding
from worker.layers.linear import ADDS_FROM_ROWS
from worker.layers.norm import RMSNorm
from worker.layers.output_head import OutputHead
from worker.layers.rotary import Rotary, Rotation
from worker.model_config import ModelConfig
from worker.parallel import TensorParallel
from worker.shard import divide_vocabulary
from worker.weights import Weight, norm_weight, stacked_weights


@runtime_checkable
class DecoderLayer(Protocol):
    """One layer of a model, an `nn.Module`. Each family has its own or takes `PreNormLayer`."""

    def forward(
        self,
        delta: Tensor | None,
        residual: Tensor,
        rotation: Rotation | None,
        attention: StepAttention,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Return what is still to be added to the residual, None if nothing is, and the residual.

        `delta` is the same of the layer before. Both [rows, hidden]; the results are those of the
        `wanted` rows, [n] int64, if not of all. The residual may be changed in place, and is
        float32 where rows are few; `delta` has the model's dtype.
        """
        ...

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        ...


class CausalLM(nn.Module):
    """A whole model on one rank, given its layers. Empty until loaded (`weights`)."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[nn.Module],
        *,
        weight_prefix: str = "",
        ignored_prefixes: tuple[str, ...] = (),
        group: TensorParallel,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`weight_prefix` is what names of tensors begin with in a checkpoint that holds more.

        `ignored_prefixes` are those of what it holds beside them.
        """
        super().__init__()
        self._weight_prefix = weight_prefix
        self._ignored_prefixes = ignored_prefixes
        self.embedding = Embedding(
            config.vocab_size,
            config.hidden_size,
            scale=config.embedding_multiplier,
            dtype=dtype,
            device=device,
        )
        ropes = [rope for rope in dict.fromkeys(config.ropes) if rope is not None]
        self.rotaries = nn.ModuleList(
            Rotary(rope, max_positions=max_model_len, dtype=dtype, device=device) for rope in ropes
        )
        self._rotary_of_layer = [
            None if rope is None else ropes.index(rope) for rope in config.ropes
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(
            config.hidden_size,
            config.rms_norm_eps,
            offset=config.norm_offset,
            dtype=dtype,
            device=device,
        )
        self._logits_divisor = config.logits_divisor
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
        turns: list[Rotation] = [rotary(positions) for rotary in self.rotaries]
        rotations = [None if index is None else turns[index] for index in self._rotary_of_layer]
        residual: Tensor = self.embedding(tokens)
        if len(tokens) < ADDS_FROM_ROWS:
            residual = residual.float()
        delta: Tensor | None = None
        *before, last = self.layers
        for layer, rotation in zip(before, rotations[:-1], strict=True):
            delta, residual = layer(delta, residual, rotation, attention)
        delta, residual = last(delta, residual, rotations[-1], attention, wanted)
        return residual if delta is None else residual.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Score this rank's part of the vocabulary for chosen rows of `forward`'s result.

        [n, hidden] -> [n, width], the same width on every rank (`worker.shard.VocabularyShard`).
        """
        scores: Tensor = self.output(self.norm(hidden))
        return scores if self._logits_divisor == 1.0 else scores.div_(self._logits_divisor)

    def weights(self) -> Iterator[Weight]:
        """Yield every tensor the checkpoint must have, and where this rank wants it."""
        for weight in self._own_weights():
            yield replace(weight, name=f"{self._weight_prefix}{weight.name}")

    def _own_weights(self) -> Iterator[Weight]:
        yield Weight(name="model.embed_tokens.weight", target=self.embedding.weight)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.weights(f"model.layers.{index}.")
        yield norm_weight(self.norm, "model.norm")
        if not self._is_tied:
            yield from stacked_weights(self.output.product, {"lm_head": self.output.ids})

    def ignored_weights(self) -> frozenset[str]:
        """Return names a checkpoint may have although the model does not need them.

        One that ends in a dot stands for all that begin with it.
        """
        names = {f"{self._weight_prefix}lm_head.weight"} if self._is_tied else set()
        return frozenset({*names, *self._ignored_prefixes})

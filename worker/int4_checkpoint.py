"""AWQ's and GPTQ's tensors, and how they become `worker.layers.int4.Int4Weight`'s layout.

Of a product X with weight [out, in] in groups of g inputs the files hold:

              AWQ                    GPTQ
    X.qweight [in, out / 8] int32    [in / 8, out] int32
    X.qzeros  [in / g, out / 8] int32, both
    X.scales  [in / g, out], both
    X.g_idx                          [in] int32: each input's group

A word holds 8 codes from its lowest bits on. AWQ's are those of outputs 0, 2, 4, 6, 1, 3, 5, 7;
GPTQ's are in order. GPTQ's first format stores zero points less 1.

With GPTQ's `desc_act` inputs were quantised in order of importance, and a group's are anywhere.
They are put side by side, and x is put in their order in every product. A rank that has a part of
the inputs has uneven parts of such groups, so this is refused there.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.errors import ModelFileError
from worker.layers.int4 import CODES_A_WORD, LEAST_GROUP, unpack
from worker.quantization_config import Int4Checkpoint
from worker.tensor_spans import Span, spans, tensor_part
from worker.weights import Weight

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of a word's codes is each output's."""


@dataclass(frozen=True, slots=True)
class Int4Part:
    """The tensors of one weight of a checkpoint, this rank's part."""

    name: str
    outputs: Span
    inputs: Span
    group: int
    """Inputs of a group in the checkpoint."""
    qweight: Weight
    qzeros: Weight
    scales: Weight
    g_idx: Weight | None

    @property
    def weights(self) -> list[Weight]:
        """The tensors to fill."""
        tensors = (self.qweight, self.qzeros, self.scales, self.g_idx)
        return [tensor for tensor in tensors if tensor is not None]


def int4_part(form: Int4Checkpoint, weight: Weight) -> Int4Part:
    """Return the tensors of a product's weight. Raises ModelFileError if --tp cannot divide it."""
    name = weight.name.removesuffix(".weight")
    outputs, inputs = spans(weight)
    for what, span in (("outputs", outputs), ("inputs", inputs)):
        if any(number % CODES_A_WORD for number in span):
            raise ModelFileError(
                f"{name}: this rank has the {what} {span.start} to {span.end} of {span.whole}; "
                f"4-bit codes are stored by {CODES_A_WORD}, so only another --tp can divide them"
            )
    group = form.group_size if 0 < form.group_size < inputs.whole else inputs.whole
    if form.has_order and inputs.size < inputs.whole:
        raise ModelFileError(
            f"{name}: a checkpoint with desc_act has groups of inputs that are anywhere, which "
            "--tp cannot divide: use --tp 1"
        )
    groups = inputs.coarse(group)
    words = outputs.coarse(CODES_A_WORD)
    packed = (inputs, words) if form.is_awq else (inputs.coarse(CODES_A_WORD), outputs)
    return Int4Part(
        name=name,
        outputs=outputs,
        inputs=inputs,
        group=group,
        qweight=tensor_part(f"{name}.qweight", torch.int32, *packed),
        qzeros=tensor_part(f"{name}.qzeros", torch.int32, groups, words),
        scales=tensor_part(f"{name}.scales", torch.float16, groups, outputs),
        g_idx=tensor_part(f"{name}.g_idx", torch.int32, inputs) if form.has_order else None,
    )


def rank_group(part: Int4Part) -> int:
    """Return how many of this rank's inputs have a scale in common, so that groups are even.

    Where a rank's part begins or ends within a group, smaller groups repeat its scale. Raises
    ModelFileError for groups that are too small.
    """
    if part.group == part.inputs.whole:
        group = part.inputs.size
    else:
        group = math.gcd(part.inputs.start, part.inputs.size, part.group)
    if group % LEAST_GROUP:
        raise ModelFileError(
            f"{part.name}: groups of {part.group} inputs come to {group} of this rank's "
            f"{part.inputs.size}, and must be multiples of {LEAST_GROUP}: use another --tp"
        )
    return group


@dataclass(frozen=True, slots=True)
class Int4Values:
    """A weight's codes, and what they are."""

    codes: Tensor
    """[out, in] uint8"""
    scales: Tensor
    """[out, groups] float16"""
    zeros: Tensor
    """[out, groups] uint8"""
    order: Tensor | None
    """[in] int64: which input each of the codes belongs to; None: in order."""


def read_values(
    form: Int4Checkpoint, part: Int4Part, group: int, device: torch.device
) -> Int4Values:
    """Return a part's values, filled, in groups of `group`. Raises ModelFileError."""
    words = unpack(part.qweight.target.to(device))
    if form.is_awq:
        codes = words[..., list(_AWQ_PLACES)].flatten(1).t()
    else:
        codes = words.transpose(1, 2).flatten(0, 1).t()
    zeros = unpack(part.qzeros.target.to(device))
    if form.is_awq:
        zeros = zeros[..., list(_AWQ_PLACES)]
    zeros = zeros.flatten(1).t() + form.zero_offset
    order = None if part.g_idx is None else _order(part, part.g_idx.target)
    if order is not None:
        codes = codes[:, order.to(device)]
    of_group = part.inputs.run_of_each(part.group, step=group).to(device)
    return Int4Values(
        codes=codes.contiguous(),
        scales=part.scales.target.to(device).t()[:, of_group],
        zeros=zeros[:, of_group],
        order=None if order is None else order.to(device),
    )


def _order(part: Int4Part, g_idx: Tensor) -> Tensor | None:
    """Return the inputs group by group, None if they are so already. Raises ModelFileError."""
    order = torch.argsort(g_idx, stable=True)
    whole = part.inputs.run_of_each(part.group)
    if not torch.equal(g_idx[order].long(), whole):
        raise ModelFileError(
            f"{part.name}.g_idx does not put {part.group} inputs into each of "
            f"{part.inputs.coarse(part.group).whole} groups"
        )
    return None if torch.equal(g_idx.long(), whole) else order

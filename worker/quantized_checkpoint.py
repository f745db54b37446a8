"""Loads products' weights from a checkpoint that is quantised.

A quantised X.weight is several tensors in the files. This turns the model's `Weight`s into those of
these tensors, which any source can fill, and puts together what has been filled:

    Weight X.weight ─► Weights X.weight (codes), X.weight_scale ─► source ─► finish ─► Linear

The products' own weights are never allocated, but for those that keep 16 bits. Codes that stay as
they are go where they belong at once; others wait on the host and are converted one by one.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from protocol.errors import ModelFileError
from worker.int4_checkpoint import Int4Part, int4_part, rank_group, read_values
from worker.layers.fp8 import Fp8Weight
from worker.layers.int4 import Int4Weight, SharedScratch, pack
from worker.layers.linear import Linear
from worker.quantization import Storage, fits_fp8
from worker.quantization_config import CheckpointQuantization, Fp8Checkpoint, Int4Checkpoint
from worker.quantizing import log_kept
from worker.tensor_spans import Span, spans, tensor_part
from worker.weights import Weight

_SUFFIX = ".weight"


class QuantizedCheckpoint:
    """The way from a quantised checkpoint's tensors to a model's products.

    Made before the model's weights are listed. Raises ModelFileError for what cannot be.
    """

    def __init__(self, model: nn.Module, form: CheckpointQuantization, storage: Storage) -> None:
        self._form = form
        self._storage = storage
        self._finishers: list[Callable[[], None]] = []
        self._kept: Counter[tuple[int, int]] = Counter()
        self._scratch: SharedScratch | None = None
        for module in model.modules():
            if isinstance(module, Linear) and not module.keeps_dtype:
                module.defer()

    def expand(self, weights: Iterable[Weight]) -> list[Weight]:
        """Return the weights of the files' tensors in place of the model's."""
        weights = list(weights)
        of_linear: dict[Linear, list[Weight]] = {}
        for weight in weights:
            if weight.linear is not None and not weight.linear.keeps_dtype:
                of_linear.setdefault(weight.linear, []).append(weight)
        expanded: list[Weight] = [
            weight for weight in weights if weight.linear is None or weight.linear.keeps_dtype
        ]
        for linear, parts in of_linear.items():
            expanded += self._expand_product(linear, parts)
        log_kept(self._kept)
        return expanded

    def ignored_weights(self, weights: Iterable[Weight]) -> frozenset[str]:
        """Return the tensors of the model's weights that files may have and nobody needs."""
        modules = [w.name.removesuffix(_SUFFIX) for w in weights if w.linear is not None]
        if isinstance(self._form, Fp8Checkpoint):
            # Scales for rows found while the checkpoint was made; ours are of the row at hand.
            endings = ["input_scale"]
        else:
            # AutoGPTQ gave products without a bias one of zeros, and all of them an order.
            endings = [] if self._form.is_awq else ["bias", "g_idx"]
        return frozenset(f"{module}.{ending}" for module in modules for ending in endings)

    def finish(self) -> None:
        """Put together what has been filled."""
        while self._finishers:
            self._finishers.pop(0)()

    def _expand_product(self, linear: Linear, parts: list[Weight]) -> list[Weight]:
        kept = [self._form.unquantized.covers(part.name.removesuffix(_SUFFIX)) for part in parts]
        if any(kept) != all(kept):
            names = ", ".join(part.name for part in parts)
            raise ModelFileError(
                f"quantization_config keeps some but not all of {names} in 16 bits; they are one "
                "product here and must be alike"
            )
        if all(kept):
            linear.allocate()
            return [part.moved(linear.weight[part.rows]) for part in parts]
        match self._form:
            case Fp8Checkpoint() as form:
                return self._expand_fp8(linear, parts, form)
            case Int4Checkpoint() as form:
                return self._expand_int4(linear, parts, form)

    def _expand_fp8(self, linear: Linear, parts: list[Weight], form: Fp8Checkpoint) -> list[Weight]:
        """Let codes with a scale a channel go to their place, and all others wait on the host."""
        quantized = None
        if self._storage == "fp8" and fits_fp8(linear.out_features, linear.in_features):
            quantized = Fp8Weight.empty(linear.out_features, linear.in_features, linear.device)
            linear.quantize(quantized)
        else:
            linear.allocate()
            if self._storage == "fp8":
                self._kept[linear.out_features, linear.in_features] += 1
        expanded = []
        for part in parts:
            outputs, inputs = spans(part)
            codes = tensor_part(part.name, torch.float8_e4m3fn, outputs, inputs)
            scale_name = f"{part.name.removesuffix(_SUFFIX)}.{form.scale_name}"
            if form.block is not None:
                block = (outputs.coarse(form.block[0]), inputs.coarse(form.block[1]))
                scales = tensor_part(scale_name, torch.float32, *block)
            else:
                one = Span(1, 0, 1)
                dims = (one,) if form.is_by_tensor else (outputs, one)
                scales = tensor_part(scale_name, torch.float32, *dims)
            if quantized is not None and form.block is None:
                codes = codes.moved(quantized.codes[part.rows])
            self._finishers.append(_fp8_finisher(linear, quantized, part, codes, scales, form))
            expanded += [codes, scales]
        return expanded

    def _expand_int4(
        self, linear: Linear, parts: list[Weight], form: Int4Checkpoint
    ) -> list[Weight]:
        """Let all tensors wait on the host until the product's turn."""
        stored = [int4_part(form, part) for part in parts]
        group = rank_group(stored[0])
        quantized = None
        if self._storage == "int4":
            if self._scratch is None:
                self._scratch = SharedScratch(linear.dtype, linear.device)
            quantized = Int4Weight.empty(
                linear.out_features,
                linear.in_features,
                group,
                dtype=linear.dtype,
                device=linear.device,
                scratch=self._scratch,
            )
            linear.quantize(quantized)
        else:
            linear.allocate()
        for number, (part, tensors) in enumerate(zip(parts, stored, strict=True)):
            self._finishers.append(
                partial(_finish_plain_int4, linear, part.rows, form, tensors, group)
                if quantized is None
                else partial(
                    _finish_int4, quantized, part.rows, form, tensors, is_first=number == 0
                )
            )
        return [weight for tensors in stored for weight in tensors.weights]


def _finish_int4(
    quantized: Int4Weight, rows: slice, form: Int4Checkpoint, part: Int4Part, *, is_first: bool
) -> None:
    """Put a part's codes into their place."""
    values = read_values(form, part, quantized.group, quantized.codes.device)
    if is_first:
        quantized.order = values.order
    elif not _are_equal(quantized.order, values.order):
        raise ModelFileError(
            f"{part.name}.g_idx orders inputs otherwise than those of the other projections of the "
            "same input, with which it is one product here"
        )
    quantized.codes[rows] = pack(values.codes)
    quantized.scales[rows] = values.scales
    quantized.zeros[rows] = values.zeros


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _finish_plain_int4(
    linear: Linear, rows: slice, form: Int4Checkpoint, part: Int4Part, group: int
) -> None:
    """Multiply a part out."""
    values = read_values(form, part, group, linear.device)
    scales = values.scales.float().repeat_interleave(group, dim=1)
    zeros = values.zeros.repeat_interleave(group, dim=1)
    wide = ((values.codes.float() - zeros) * scales).to(linear.dtype)
    if values.order is None:
        linear.weight[rows] = wide
    else:
        linear.weight[rows, values.order] = wide


def _fp8_finisher(
    linear: Linear,
    quantized: Fp8Weight | None,
    part: Weight,
    codes: Weight,
    scales: Weight,
    form: Fp8Checkpoint,
) -> Callable[[], None]:
    def finish() -> None:
        wide = scales.target.to(linear.device)
        if form.block is not None:
            for dim, (span, size) in enumerate(zip(spans(part), form.block, strict=True)):
                wide = wide.index_select(dim, span.run_of_each(size).to(linear.device))
        if quantized is not None and form.block is None:
            quantized.scales[part.rows] = wide.view(-1)
            return
        values = codes.target.to(linear.device).float() * wide
        if quantized is None:
            linear.weight[part.rows] = values.to(linear.dtype)
            return
        # Rounded to 16 bits, as if the checkpoint were, before each channel gets its own scale.
        again = Fp8Weight.quantize(values.to(linear.dtype))
        quantized.codes[part.rows] = again.codes
        quantized.scales[part.rows] = again.scales

    return finish

"""Weights from a GGUF file, dequantised by the `gguf` package one tensor at a time.

Only one tensor is in memory twice at any moment. A rank reads and dequantises every tensor whole,
since blocks of quantised numbers do not end where shards do, and keeps its part. GGUF stores the
rows of Llama's query and key projections with the two halves of each head interleaved, as the
original rotary layout wants them; here they are put back into halves. Other architectures' are
stored as they are.
"""

import math
import re
from collections.abc import Sequence

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.errors import ModelFileError
from worker.gguf_file import GgufHeader, GgufTensor
from worker.gguf_rope import ROPE_TENSORS
from worker.weights import Weight

_TOP_LEVEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_name(name: str) -> str:
    """Return what GGUF calls a tensor of a supported architecture."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _LAYER_NAME.fullmatch(name)
    assert match is not None, f"no GGUF name for {name}"
    layer, part, kind = match.groups()
    return f"blk.{layer}.{_IN_LAYER[part]}.{kind}"


def load_gguf(
    header: GgufHeader, weights: Sequence[Weight], *, head_dim: int, ignored: frozenset[str]
) -> None:
    """Fill weights from a GGUF file. Raises ModelFileError naming file and tensor."""
    is_interleaved = header.metadata["general.architecture"] == "llama"
    unused = header.tensors.keys() - ROPE_TENSORS - {gguf_name(name) for name in ignored}
    places: list[tuple[Weight, str, GgufTensor, int]] = []
    for weight in weights:
        name = gguf_name(weight.name)
        tensor = header.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{header.path}: the tensor {name} is missing")
        places.append((weight, name, tensor, _checked_bytes(header, weight, name, tensor)))
        unused -= {name}
    for name in sorted(unused):
        raise ModelFileError(f"{header.path}: the tensor {name} is not part of this model")
    try:
        with open(header.path, "rb") as file:
            for weight, name, tensor, num_bytes in places:
                file.seek(tensor.offset)
                data = np.fromfile(file, dtype=np.uint8, count=num_bytes)
                if len(data) != num_bytes:
                    raise ModelFileError(f"{header.path} ends inside {name}; it is truncated")
                values = _dequantized(header, name, tensor, data)
                if is_interleaved and (".q_proj." in weight.name or ".k_proj." in weight.name):
                    values = halves_from_pairs(values, head_dim)
                weight.fill(values)
    except OSError as error:
        raise ModelFileError(f"{header.path} cannot be read: {error.strerror}") from error


def halves_from_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows from (a0, b0, a1, b1, …) to (a0, a1, …, b0, b1, …)."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _checked_bytes(header: GgufHeader, weight: Weight, name: str, tensor: GgufTensor) -> int:
    """Return a tensor's size in the file, having checked shape, format and bounds."""
    if tensor.shape != weight.shape:
        raise ModelFileError(
            f"{header.path}: the tensor {name} has shape {list(tensor.shape)}; the header's "
            f"metadata makes it {list(weight.shape)}"
        )
    try:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
    except (ValueError, KeyError) as error:
        raise ModelFileError(
            f"{header.path}: the tensor {name} has the unknown storage type {tensor.type_id}"
        ) from error
    if tensor.shape[-1] % block_size:
        raise ModelFileError(
            f"{header.path}: rows of the tensor {name} are not whole blocks of {block_size}"
        )
    num_bytes: int = math.prod(tensor.shape) // block_size * block_bytes
    if tensor.offset + num_bytes > header.file_bytes:
        raise ModelFileError(f"{header.path} ends inside {name}; it is truncated")
    return num_bytes


def _dequantized(
    header: GgufHeader, name: str, tensor: GgufTensor, data: NDArray[np.uint8]
) -> Tensor:
    """Return a tensor's values as float32."""
    kind = gguf.GGMLQuantizationType(tensor.type_id)
    rows = data.reshape(*tensor.shape[:-1], -1)
    try:
        values: NDArray[np.float32] = gguf.dequantize(rows, kind)
    except NotImplementedError as error:
        raise ModelFileError(
            f"{header.path}: the tensor {name} is stored as {kind.name}, which cannot be read"
        ) from error
    return torch.from_numpy(values)

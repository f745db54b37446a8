"""Weights from safetensors files: one file, or shards named by an index.

Before anything is read, every header is checked (`worker.safetensors_header`), then the model's
tensors for presence, shape and dtype. A rank reads its own part of each tensor only.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from protocol.errors import ModelFileError
from worker.json_object import read_json
from worker.safetensors_header import StoredTensor, read_header
from worker.tensor_reader import StoredPart, read_parts
from worker.weights import Weight

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth")

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "U8": torch.uint8,
}
"""By the format's name."""
_CODES = (torch.float8_e4m3fn, torch.int32, torch.uint8)
"""What is not converted: codes, which whoever asked for them can read, and bytes of such."""
_ROTARY_BUFFER = ".rotary_emb.inv_freq"
"""Old checkpoints carry the rotary frequencies, which follow from the config."""


def load_safetensors(
    directory: Path, weights: Sequence[Weight], *, ignored: frozenset[str], threads: int
) -> int:
    """Fill weights from a model directory by some threads and return the bytes read.

    `ignored` are tensors that the files may have although no weight wants them; a name that ends
    in a dot stands for all that begin with it. Raises ModelFileError naming file and tensor.
    """
    stored = read_headers(directory)
    wanted: dict[Path, list[StoredPart]] = {}
    for weight in weights:
        tensor = stored.get(weight.name)
        if tensor is None:
            raise ModelFileError(f"{directory}: no file holds the tensor {weight.name}")
        _check(weight, tensor)
        wanted.setdefault(tensor.path, []).append(_part(weight, tensor))
    ignored_prefixes = tuple(name for name in ignored if name.endswith("."))
    unused = stored.keys() - {weight.name for weight in weights} - ignored
    for name in sorted(unused):
        if not name.endswith(_ROTARY_BUFFER) and not name.startswith(ignored_prefixes):
            raise ModelFileError(
                f"{stored[name].path}: the tensor {name} is not part of this model"
            )
    return sum(read_parts(path, parts, threads=threads) for path, parts in wanted.items())


def _weight_files(directory: Path) -> Mapping[Path, frozenset[str] | None]:
    """Return the files to read, each with the tensors an index says it holds (None: any)."""
    index_path = directory / INDEX_FILE
    if not index_path.exists():
        if not (directory / SINGLE_FILE).exists():
            raise _without_weights(directory)
        return {directory / SINGLE_FILE: None}
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index_path}: weight_map must be an object of tensor: file")
    shards: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        # A plain name cannot lead out of the directory, whatever the file system does with dots.
        if not isinstance(file_name, str) or Path(file_name).name != file_name or not file_name:
            raise ModelFileError(
                f"{index_path}: {name} is said to be in {file_name!r}; it must be the name of a "
                "file in the same directory"
            )
        shards.setdefault(file_name, set()).add(name)
    return {directory / file_name: frozenset(names) for file_name, names in shards.items()}


def _without_weights(directory: Path) -> ModelFileError:
    """Return the sentence about a directory without a file that can be read."""
    names = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLED_SUFFIXES)
    if not names:
        return ModelFileError(
            f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}; weights in other forms "
            "than safetensors and GGUF are not read"
        )
    return ModelFileError(
        f"{directory} holds its weights as {names[0]}, which can run code when it is read and is "
        "therefore not; convert it once, where you trust it, with transformers: "
        f"AutoModelForCausalLM.from_pretrained({str(directory)!r}, "
        f'dtype="auto").save_pretrained({str(directory)!r})'
    )


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model directory by name. Raises ModelFileError."""
    tensors: dict[str, StoredTensor] = {}
    for path, expected in _weight_files(directory).items():
        header = read_header(path)
        if expected is not None:
            for name in sorted(expected - header.keys()):
                raise ModelFileError(f"{path}: the index says it holds {name}, but it does not")
        for name, tensor in header.items():
            if name in tensors:
                raise ModelFileError(f"{path}: the tensor {name} is also in {tensors[name].path}")
            tensors[name] = tensor
    return tensors


def _check(weight: Weight, tensor: StoredTensor) -> None:
    # A single number counts as a row of one.
    if (tensor.shape or (1,)) != (weight.shape or (1,)):
        raise ModelFileError(
            f"{tensor.path}: the tensor {weight.name} has shape {list(tensor.shape)}; "
            f"config.json makes it {list(weight.shape)}"
        )
    wanted = weight.target.dtype
    supported = [
        name
        for name, dtype in TORCH_DTYPES.items()
        if (dtype == wanted if wanted in _CODES else dtype not in _CODES)
    ]
    if tensor.dtype not in supported:
        raise ModelFileError(
            f"{tensor.path}: the tensor {weight.name} is stored as {tensor.dtype}; supported: "
            f"{', '.join(supported)}"
        )


def _part(weight: Weight, tensor: StoredTensor) -> StoredPart:
    # A single number is read as a row of one.
    return StoredPart(
        name=weight.name,
        offset=tensor.offset,
        dtype=TORCH_DTYPES[tensor.dtype],
        shape=tensor.shape or (1,),
        dim=weight.dim,
        start=weight.start,
        target=weight.target if tensor.shape else weight.target.view(1),
    )

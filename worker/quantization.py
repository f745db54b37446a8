"""How a model's products keep their weights, and what that takes. Imports no torch.

`--quantization` says it: `none` keeps the model's dtype, `fp8` takes 8 bits, `auto` does what the
checkpoint does. It concerns the products inside the layers: embedding, output head, norms and the
routers of experts keep the model's dtype.
"""

from typing import Literal, TypeAlias

from protocol.errors import ConfigError
from worker.product_shapes import ProductShape
from worker.quantization_config import CheckpointQuantization, Int4Checkpoint

Storage: TypeAlias = Literal["none", "fp8", "int4"]

FP8_MULTIPLE = 16
"""Inputs and outputs of a product in fp8 are a multiple of it."""
FP8_CAPABILITY = (8, 9)
"""The first GPUs that multiply 8-bit floats."""
_SCALE_BYTES = 4
_GROUP_BYTES = 3
"""Of a scale and a zero point in 4 bits."""


def choose_storage(flag: str, checkpoint: CheckpointQuantization | None) -> Storage:
    """Return how products keep their weights, by `--quantization` and what the checkpoint is.

    Raises ConfigError for what would be rounded twice.
    """
    match checkpoint, flag:
        case (_, "none") | (None, "auto"):
            return "none"
        case Int4Checkpoint(), "fp8":
            raise ConfigError(
                "--quantization fp8 is not for a checkpoint in 4 bits: use auto, or none."
            )
        case Int4Checkpoint(), _:
            return "int4"
        case _:
            return "fp8"


def check_storage(
    storage: Storage, *, capability: tuple[int, int] | None, dtype: str, flag: str
) -> None:
    """Raise ConfigError if a GPU of this capability, None on CPU, cannot multiply such weights.

    `dtype` is the model's, `flag` that of `--quantization`.
    """
    if storage != "fp8" or capability is None:
        return
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"--quantization {flag}: fp8 needs a GPU of compute capability 8.9 or later (Ada, "
            f"Hopper), and this one has {capability[0]}.{capability[1]}: use none."
        )
    if dtype != "bfloat16":
        raise ConfigError(
            f"--quantization {flag}: products in fp8 give bfloat16 on a GPU, and --dtype is "
            f"{dtype}: use --dtype bfloat16, or --quantization none."
        )


def fits_fp8(outputs: int, inputs: int) -> bool:
    """Whether a product of these sizes can have its weight in fp8."""
    return outputs % FP8_MULTIPLE == 0 and inputs % FP8_MULTIPLE == 0


def bytes_saved(
    storage: Storage,
    shape: ProductShape,
    item_bytes: int,
    checkpoint: CheckpointQuantization | None = None,
) -> int:
    """Return how many bytes fewer than `item_bytes` a number a product's weight takes."""
    outputs, inputs = shape.outputs, shape.inputs
    match storage:
        case "none":
            return 0
        case "fp8":
            kept = inputs + _SCALE_BYTES
            return outputs * (inputs * item_bytes - kept) if fits_fp8(outputs, inputs) else 0
        case "int4":
            assert isinstance(checkpoint, Int4Checkpoint), "only checkpoints are in 4 bits"
            group = checkpoint.group_size if checkpoint.group_size > 0 else inputs
            kept = inputs // 2 + -(-inputs // group) * _GROUP_BYTES
            return outputs * (inputs * item_bytes - kept)

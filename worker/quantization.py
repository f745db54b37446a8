"""How a model's products keep their weights, and what that takes. Imports no torch.

`--quantization` says it: `none` keeps the model's dtype, `fp8` takes 8 bits, `auto` does what the
checkpoint does. It concerns the products inside the layers: embedding, output head, norms and the
routers of experts keep the model's dtype.
"""

from typing import Literal, TypeAlias

from protocol.errors import ConfigError
from worker.product_shapes import ProductShape
from worker.quantization_config import CheckpointQuantization

Storage: TypeAlias = Literal["none", "fp8"]

FP8_MULTIPLE = 16
"""Inputs and outputs of a product in fp8 are a multiple of it."""
FP8_CAPABILITY = (8, 9)
"""The first GPUs that multiply 8-bit floats."""
_SCALE_BYTES = 4


def choose_storage(flag: str, checkpoint: CheckpointQuantization | None) -> Storage:
    """Return how products keep their weights, by `--quantization` and what the checkpoint is."""
    if flag == "auto":
        return "none" if checkpoint is None else "fp8"
    return "fp8" if flag == "fp8" else "none"


def check_storage(
    storage: Storage, *, capability: tuple[int, int] | None, dtype: str, flag: str
) -> None:
    """Raise ConfigError if a GPU of this capability, None on CPU, cannot multiply such weights.

    `dtype` is the model's, `flag` that of `--quantization`.
    """
    if storage == "none" or capability is None:
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


def bytes_saved(storage: Storage, shape: ProductShape, item_bytes: int) -> int:
    """Return how many bytes fewer than `item_bytes` a number a product's weight takes."""
    if storage == "none" or not fits_fp8(shape.outputs, shape.inputs):
        return 0
    return shape.outputs * (shape.inputs * (item_bytes - 1) - _SCALE_BYTES)

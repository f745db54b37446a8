"""Which attention back end a rank uses, and building it.

The choice is a pure function of flags, dtype, device and what is installed, so that every rank
makes the same one and a test can ask for all of them.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from protocol.errors import ConfigError
from worker.attention.base import LayerAttention
from worker.attention.by_rows import KernelsByRows
from worker.attention.paged import KVWriter, PagedAttention, PagedKernels, write_by_torch
from worker.attention.torch_attention import TorchAttention
from worker.kv_cache import KVCache, KVLayout
from worker.kv_rounding import E4M3

HOPPER = (9, 0)
_FIRST_WITH_FP8 = (8, 9)
"""The first GPUs that convert e4m3, for Triton."""
_FP8_HEAD_MULTIPLE = 16
"""FA3's heads are a multiple of 16 bytes."""
MAX_PAGED_HEAD_DIM = 256
_HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library of paged attention."""

    module: str
    remedy: str
    """How to get it where it is missing."""
    block_multiple: int
    """Block sizes are multiples of this."""
    default_block_size: int


LIBRARIES: Mapping[str, Library] = {
    "flash-attn": Library(
        module="flash_attn",
        remedy="install it with `pip install .[cuda]`",
        block_multiple=256,
        default_block_size=256,
    ),
    "fa3": Library(
        module="flash_attn_interface",
        remedy="install it with `pip install .[hopper]`",
        block_multiple=1,
        default_block_size=64,
    ),
    "triton": Library(
        module="triton",
        remedy="it comes with a torch built for CUDA",
        block_multiple=16,
        default_block_size=64,
    ),
}
TORCH_BLOCK_SIZE = 16
MOST_ROWS_OF_OUR_DECODE: Mapping[str, int] = {"flash-attn": 256, "fa3": 256}
"""Up to how many decode rows our own kernel replaces a library's: it is faster at
every count measured by `python -m benchmarks.attention_speed`, on an H200 by 3 to 40 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """A back end and why it was chosen."""

    name: str
    reason: str

    @property
    def layout(self) -> KVLayout:
        """How its cache lies in memory."""
        return KVLayout.HEADS_FIRST if self.name == "torch" else KVLayout.BLOCKS_FIRST

    @property
    def is_graphable(self) -> bool:
        """Whether its decode steps may be captured in a CUDA graph."""
        return self.name != "torch"

    def block_size(self, requested: int | None) -> int:
        """Return the block size to use: `requested`, or the back end's own.

        Raises ConfigError for a size the back end cannot read.
        """
        if self.name == "torch":
            return requested or TORCH_BLOCK_SIZE
        library = LIBRARIES[self.name]
        if requested is not None and requested % library.block_multiple:
            raise ConfigError(
                f"--block-size {requested} does not work with --attention {self.name}: use a "
                f"multiple of {library.block_multiple}."
            )
        return requested or library.default_block_size


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def choose_attention(
    requested: str,
    *,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    head_dim: int,
    is_fp8: bool = False,
    installed: Callable[[str], bool] = is_installed,
) -> AttentionChoice:
    """Return the back end that `--attention` asks for, or the fastest there is.

    `capability` is the GPU's, None on CPU; `is_fp8` says that the KV cache is in fp8. Raises
    ConfigError where the one asked for does not work, saying what does.
    """
    if requested == "torch":
        return AttentionChoice(name="torch", reason="asked for")
    if requested != "auto":
        library = LIBRARIES[requested]
        if obstacle := _obstacle(requested, capability, dtype, head_dim, is_fp8=is_fp8):
            raise ConfigError(f"--attention {requested} {obstacle}.")
        if not installed(library.module):
            raise ConfigError(
                f"--attention {requested} needs the module {library.module}: {library.remedy}."
            )
        return AttentionChoice(name=requested, reason="asked for")
    if capability is None:
        return AttentionChoice(name="torch", reason="no GPU is used")
    obstacles = []
    # Ours computes in float32 too, but there torch is the reference and nobody asks for speed.
    order = ("fa3", "flash-attn", "triton") if dtype in _HALF_DTYPES else ("fa3", "flash-attn")
    reason = "the fastest that works here"
    if is_fp8 and dtype in _HALF_DTYPES:
        # Ours multiplies in the model's dtype, FA3 in fp8, and Hopper's tensor cores keep too few
        # bits of long sums of such products.
        order, reason = ("triton", "fa3"), "the most accurate over a KV cache in fp8"
    for name in order:
        obstacle = _obstacle(name, capability, dtype, head_dim, is_fp8=is_fp8)
        if obstacle is None and installed(LIBRARIES[name].module):
            return AttentionChoice(name=name, reason=reason)
        obstacles.append(f"{name} {obstacle or 'is not installed'}")
    return AttentionChoice(name="torch", reason="; ".join(obstacles))


def _obstacle(
    name: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    head_dim: int,
    *,
    is_fp8: bool,
) -> str | None:
    """Return why a library does not work here, to follow its name, or None if it does."""
    if capability is None:
        return "needs CUDA: use torch or auto"
    if name == "triton":
        return _obstacle_to_ours(capability, dtype, head_dim, is_fp8=is_fp8)
    if name == "flash-attn" and is_fp8:
        return "cannot read a KV cache in fp8: use triton, fa3 or auto, or --kv-cache-dtype auto"
    if dtype not in _HALF_DTYPES:
        return "computes in half precision: use --dtype float16 or bfloat16, or --attention torch"
    if head_dim % 8 or head_dim > MAX_PAGED_HEAD_DIM:
        return (
            f"cannot do heads of {head_dim}, only multiples of 8 up to {MAX_PAGED_HEAD_DIM}: "
            "use --attention torch"
        )
    if name == "fa3" and capability != HOPPER:
        return "needs a Hopper GPU (H100, H200): use flash-attn or auto"
    if name == "flash-attn" and capability < (8, 0):
        return "needs a GPU since Ampere (A100): use torch or auto"
    if is_fp8 and dtype != torch.bfloat16:
        return "gives bfloat16 over a KV cache in fp8: use --dtype bfloat16, or --attention triton"
    if is_fp8 and head_dim % _FP8_HEAD_MULTIPLE:
        return (
            f"cannot do heads of {head_dim} over a KV cache in fp8, only multiples of "
            f"{_FP8_HEAD_MULTIPLE}: use --attention triton"
        )
    return None


def _obstacle_to_ours(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, *, is_fp8: bool
) -> str | None:
    if is_fp8 and capability < _FIRST_WITH_FP8:
        return (
            "reads a KV cache in fp8 only since Ada (L4, L40): use torch or --kv-cache-dtype auto"
        )
    if dtype == torch.bfloat16 and capability < (8, 0):
        return "computes in bfloat16 only since Ampere (A100): use --dtype float16"
    if head_dim > MAX_PAGED_HEAD_DIM:
        return f"cannot do heads of {head_dim}, only up to {MAX_PAGED_HEAD_DIM}: use torch"
    return None


def build_attention(
    name: str,
    cache: KVCache,
    num_heads: int,
    layers: Sequence[LayerAttention],
    dtype: torch.dtype | None = None,
) -> TorchAttention | PagedAttention:
    """Return the back end of this name over a cache of its layout, for layers that attend so.

    `dtype` is the model's; None: the cache's, which is not in fp8.
    """
    dtype = dtype or cache.data.dtype
    assert dtype != E4M3, "nothing is computed in fp8"
    assert cache.data.dtype in (dtype, E4M3), "keys and values are the model's, or rounded"
    if name == "torch":
        return TorchAttention(cache, num_heads, layers, dtype)
    return PagedAttention(cache, _kernels(name, cache, num_heads, dtype), _writer(cache), layers)


def _writer(cache: KVCache) -> KVWriter:
    if not cache.data.is_cuda:
        return write_by_torch
    # Imported here because Triton is there only where there are GPUs.
    from worker.attention.fused_write import write_fused  # noqa: PLC0415

    return write_fused


def _kernels(name: str, cache: KVCache, num_heads: int, dtype: torch.dtype) -> PagedKernels:
    kernels = _library_kernels(name, cache, num_heads, dtype)
    most_few = MOST_ROWS_OF_OUR_DECODE.get(name, 0)
    if not most_few or cache.shape.block_size % LIBRARIES["triton"].block_multiple:
        return kernels
    if cache.data.dtype == E4M3:
        # Ours would not round the queries, so that a row's numbers were far others among few rows.
        return kernels
    few = _library_kernels("triton", cache, num_heads, dtype)
    return KernelsByRows(few, kernels, most_few=most_few)


def _library_kernels(name: str, cache: KVCache, num_heads: int, dtype: torch.dtype) -> PagedKernels:
    shape = cache.shape
    num_processors = _num_processors(cache.data.device)
    # Imported here because each takes seconds, and few machines have all.
    if name == "fa3":
        from worker.attention.fa3 import Fa3Kernels  # noqa: PLC0415

        return Fa3Kernels(shape, num_heads, cache.data.dtype, num_processors=num_processors)
    if name == "triton":
        from worker.attention.triton_paged import TritonKernels  # noqa: PLC0415

        return TritonKernels(shape, num_heads, dtype, num_processors=num_processors)
    assert name == "flash-attn", f"there is no attention back end {name}"
    from worker.attention.flash_attn import FlashAttnKernels  # noqa: PLC0415

    return FlashAttnKernels()


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter, which runs one program after another
    return torch.cuda.get_device_properties(device).multi_processor_count

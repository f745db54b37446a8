import pytest
import torch

from protocol.errors import ConfigError
from tests.worker.plain_kernels import PlainKernels
from worker.attention.base import LayerAttention
from worker.attention.choice import (
    MOST_ROWS_OF_OUR_DECODE,
    AttentionChoice,
    build_attention,
    choose_attention,
)
from worker.kv_cache import KVCache, KVCacheShape, KVLayout

HOPPER, AMPERE, TURING, BLACKWELL, ADA = (9, 0), (8, 0), (7, 5), (10, 0), (8, 9)
ALL = ("flash_attn", "flash_attn_interface", "triton")


def choose(
    requested: str = "auto",
    *,
    capability: tuple[int, int] | None = HOPPER,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    is_fp8: bool = False,
    installed: tuple[str, ...] = ALL,
) -> AttentionChoice:
    return choose_attention(
        requested,
        capability=capability,
        dtype=dtype,
        head_dim=head_dim,
        is_fp8=is_fp8,
        installed=installed.__contains__,
    )


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({}, "fa3"),
        ({"dtype": torch.float16}, "fa3"),
        ({"installed": ("flash_attn",)}, "flash-attn"),
        ({"installed": ("triton",)}, "triton"),
        ({"installed": ()}, "torch"),
        ({"capability": AMPERE}, "flash-attn"),
        ({"capability": BLACKWELL}, "flash-attn"),
        ({"capability": TURING}, "torch"),
        ({"capability": TURING, "dtype": torch.float16}, "triton"),
        ({"capability": None}, "torch"),
        ({"dtype": torch.float32}, "torch"),
        ({"head_dim": 80}, "fa3"),
        ({"head_dim": 100}, "triton"),
        ({"head_dim": 320}, "torch"),
    ],
)
def test_auto(facts, name: str):
    choice = choose(**facts)
    assert choice.name == name
    assert choice.is_graphable == (name != "torch")
    assert (choice.layout is KVLayout.HEADS_FIRST) == (name == "torch")


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({}, "triton"),
        ({"capability": ADA, "dtype": torch.float16}, "triton"),
        ({"installed": ("flash_attn_interface", "flash_attn")}, "fa3"),
        ({"capability": AMPERE}, "torch"),
        ({"dtype": torch.float32}, "torch"),
        ({"capability": None}, "torch"),
        ({"head_dim": 320}, "torch"),
    ],
)
def test_auto_takes_one_that_reads_fp8(facts, name: str):
    assert choose(is_fp8=True, **facts).name == name


@pytest.mark.parametrize(
    ("requested", "facts", "sentence"),
    [
        ("flash-attn", {}, r"flash-attn cannot read a KV cache in fp8: use triton, fa3 or auto"),
        ("fa3", {"dtype": torch.float16}, "gives bfloat16 over a KV cache in fp8"),
        ("fa3", {"head_dim": 72}, "heads of 72 over a KV cache in fp8, only multiples of 16"),
        ("triton", {"capability": AMPERE}, "reads a KV cache in fp8 only since Ada"),
    ],
)
def test_refused_over_a_cache_in_fp8(requested: str, facts, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        choose(requested, is_fp8=True, **facts)


def test_auto_says_why_not():
    assert choose(capability=AMPERE, installed=()).reason == (
        "fa3 needs a Hopper GPU (H100, H200): use flash-attn or auto; flash-attn is not installed; "
        "triton is not installed"
    )
    assert choose(capability=None).reason == "no GPU is used"


@pytest.mark.parametrize("name", ["fa3", "flash-attn", "triton", "torch"])
def test_asked_for(name: str):
    assert choose(name).name == name


@pytest.mark.parametrize(
    ("requested", "facts", "sentence"),
    [
        ("fa3", {"installed": ("flash_attn",)}, r"`pip install \.\[hopper\]`"),
        ("flash-attn", {"installed": ()}, r"`pip install \.\[cuda\]`"),
        ("fa3", {"capability": None}, "needs CUDA: use torch or auto"),
        ("fa3", {"capability": AMPERE}, "needs a Hopper GPU"),
        ("flash-attn", {"capability": TURING}, "Ampere"),
        ("fa3", {"dtype": torch.float32}, "--dtype float16 or bfloat16"),
        ("flash-attn", {"head_dim": 100}, "multiples of 8 up to 256"),
        ("triton", {"capability": None}, "needs CUDA: use torch or auto"),
        ("triton", {"installed": ()}, "it comes with a torch built for CUDA"),
        ("triton", {"capability": TURING}, "bfloat16 only since Ampere"),
        ("triton", {"head_dim": 320}, "cannot do heads of 320, only up to 256"),
    ],
)
def test_refused(requested: str, facts, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        choose(requested, **facts)


def test_ours_computes_in_float32_when_asked():
    assert choose("triton", dtype=torch.float32).name == "triton"


def test_block_sizes():
    defaults = {"fa3": 64, "flash-attn": 256, "triton": 64, "torch": 16}
    for name, size in defaults.items():
        assert AttentionChoice(name=name, reason="").block_size(None) == size
    assert choose("fa3").block_size(7) == 7
    assert choose("flash-attn").block_size(512) == 512
    with pytest.raises(ConfigError, match=r"--block-size 64 .* a multiple of 256"):
        choose("flash-attn").block_size(64)
    with pytest.raises(ConfigError, match=r"--block-size 24 .* a multiple of 16"):
        choose("triton").block_size(24)


@pytest.mark.parametrize(
    ("block_size", "most_few", "kv_dtype", "built"),
    [
        (64, 8, torch.bfloat16, ["fa3", "triton"]),
        (64, 0, torch.bfloat16, ["fa3"]),
        (40, 8, torch.bfloat16, ["fa3"]),
        (64, 8, torch.float8_e4m3fn, ["fa3"]),
    ],
)
def test_our_decode_for_few_rows(
    block_size: int, most_few: int, kv_dtype: torch.dtype, built: list[str], monkeypatch
):
    names: list[str] = []

    def library_kernels(name: str, *_) -> PlainKernels:
        names.append(name)
        return PlainKernels()

    monkeypatch.setattr("worker.attention.choice._library_kernels", library_kernels)
    monkeypatch.setitem(MOST_ROWS_OF_OUR_DECODE, "fa3", most_few)
    shape = KVCacheShape(num_layers=1, num_kv_heads=1, head_dim=8, block_size=block_size)
    cache = KVCache(
        shape,
        1,
        dtype=kv_dtype,
        device=torch.device("cpu"),
        layout=KVLayout.BLOCKS_FIRST,
    )
    build_attention("fa3", cache, 1, [LayerAttention(1.0, None)], torch.bfloat16)
    assert names == built

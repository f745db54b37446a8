import pytest
import torch
from torch import Tensor

from benchmarks.attention_cases import plain_attention
from worker.attention.base import LayerAttention

pytest.importorskip("triton")

from worker.kernels.decode_attention import start_split_decode
from worker.kernels.decode_tuning import DecodeTuning

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = (0, 1, 31, 32, 33, 100, 130)


def random_rows(
    num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Return each row's contents, lengths, tables, and a cache [2, blocks, ...] with them in it."""
    generator = torch.Generator().manual_seed(0)
    width = -(-max(LENGTHS) // block_size)
    num_blocks = len(LENGTHS) * width
    tables = torch.randperm(num_blocks, generator=generator).view(-1, width).int()
    cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    contents = []
    for table, length in zip(tables, LENGTHS, strict=True):
        tokens = torch.randn(length, 2, num_kv_heads, head_dim, generator=generator).to(dtype)
        positions = torch.arange(length)
        cache[:, table[positions // block_size].long(), positions % block_size] = tokens.transpose(
            0, 1
        )
        table[-(-length // block_size) :] = -1  # never to be followed
        contents.append(tokens.to(DEVICE))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    return contents, lengths.to(DEVICE), tables.to(DEVICE), cache.to(DEVICE)


def sinks_of(num_heads: int) -> Tensor:
    """Return sinks, one of which is above every score and another below all."""
    return torch.linspace(40, -40, num_heads).to(DEVICE)


@pytest.mark.parametrize("combines_at_once", [True, False])
@pytest.mark.parametrize(
    ("heads", "block_size", "tile", "dtype"),
    [
        ((6, 2, 80), 16, 32, torch.float32),  # tiles span blocks
        ((4, 1, 64), 64, 16, torch.float16),  # blocks span tiles
        ((1, 1, 16), 48, 32, torch.float32),  # neither divides the other
    ],
)
@pytest.mark.parametrize("num_processors", [1, 100])
def test_attends(heads, block_size, tile, dtype, combines_at_once, num_processors, monkeypatch):
    monkeypatch.setattr("worker.kernels.decode_tuning._MIN_SPLITS", 2)  # so that splits grow
    # So few at a time that they are added up in several turns.
    monkeypatch.setattr("worker.kernels.decode_attention._COMBINED_NUMBERS", 128)
    num_heads, num_kv_heads, head_dim = heads
    contents, lengths, tables, cache = random_rows(num_kv_heads, head_dim, block_size, dtype)
    decode = start_split_decode(
        lengths,
        tables,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_processors=num_processors,
        tuning=DecodeTuning(
            tile=tile, warps=4, stages=2, split_length=32, combines_at_once=combines_at_once
        ),
    )
    assert decode.num_splits == (
        2 if num_processors == 1 else -(-tables.shape[1] * block_size // 32)
    )
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(len(LENGTHS), 1, num_heads, head_dim, generator=generator)
    query = query.to(DEVICE, dtype)
    expected = torch.cat(
        [
            plain_attention(q, c, len(c) - 1, torch.float64) if len(c) else q.flatten(1) * 0
            for q, c in zip(query, contents, strict=True)
        ]
    ).view(query.shape)
    for _ in range(2):  # the counts of arrivals must have gone back to zero
        output = decode(query, cache[0], cache[1], LayerAttention(head_dim**-0.5, None))
        error = float((output - expected).abs().max())
        assert error < (2e-3 if dtype == torch.float16 else 2e-6)
        assert not decode.arrivals.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "has_sinks", "combines_at_once"),
    [
        (1, True, True),
        (16, False, True),
        (70, True, True),
        (70, False, False),
        (1000, True, False),
        (None, True, True),
    ],
)
def test_windows_sinks_and_scale(window, has_sinks, combines_at_once, monkeypatch):
    monkeypatch.setattr("worker.kernels.decode_tuning._MIN_SPLITS", 2)
    num_heads, num_kv_heads, head_dim, block_size = 3, 1, 16, 16
    contents, lengths, tables, cache = random_rows(
        num_kv_heads, head_dim, block_size, torch.float32
    )
    how = LayerAttention(0.3, window)
    sinks = sinks_of(num_heads) if has_sinks else None
    if window is not None:
        hide_all_before(window, tables, cache)
    decode = start_split_decode(
        lengths,
        tables,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_processors=1,
        tuning=DecodeTuning(
            tile=32, warps=4, stages=2, split_length=32, combines_at_once=combines_at_once
        ),
        window=window,
    )
    assert decode.num_splits == (1 if window == 1 else 2)
    query = torch.randn(
        len(LENGTHS), 1, num_heads, head_dim, generator=torch.Generator().manual_seed(1)
    ).to(DEVICE)
    expected = torch.cat(
        [
            plain_attention(q, c, len(c) - 1, torch.float64, how=how, sinks=sinks)
            if len(c)
            else q.flatten(1) * 0
            for q, c in zip(query, contents, strict=True)
        ]
    ).view(query.shape)
    output = decode(query, cache[0], cache[1], how, sinks)
    assert float((output - expected).abs().max()) < 2e-6
    assert not decode.arrivals.any()


def hide_all_before(window: int, tables: Tensor, cache: Tensor) -> None:
    """Put what is no number where no row may look."""
    size = cache.shape[2]
    for table, length in zip(tables, LENGTHS, strict=True):
        positions = torch.arange(max(0, length - window), device=DEVICE)
        cache[:, table[positions // size].long(), positions % size] = torch.nan

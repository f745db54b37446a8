import pytest
import torch
from torch import Tensor

from benchmarks.attention_cases import plain_attention

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
        output = decode(query, cache[0], cache[1])
        error = float((output - expected).abs().max())
        assert error < (2e-3 if dtype == torch.float16 else 2e-6)
        assert not decode.arrivals.any()

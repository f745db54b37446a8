import pytest

from worker.attention.fa3_splits import chunk_splits, decode_splits


@pytest.mark.parametrize(
    ("rows", "num_kv_heads", "capacity", "splits"),
    [
        (1, 8, 512, 1),  # to add splits up would take longer
        (1, 8, 1024, 8),
        (1, 8, 40_960, 16),
        (1, 1, 40_960, 128),
        (16, 8, 4096, 16),
        (64, 8, 4096, 2),
        (256, 8, 1600, 1),
        (256, 8, 40_960, 16),
        (1, 200, 4096, 1),
    ],
)
def test_decode_rows(rows: int, num_kv_heads: int, capacity: int, splits: int):
    assert decode_splits(rows, num_kv_heads, capacity, 132) == splits


@pytest.mark.parametrize(
    ("rows", "max_length", "splits"),
    [
        (16, 8192, 16),
        (16, 300, 1),
        (256, 8192, 4),
        (8192, 40_960, 1),
    ],
)
def test_chunks(rows: int, max_length: int, splits: int):
    assert chunk_splits(rows, 2, 8, max_length, 132) == splits

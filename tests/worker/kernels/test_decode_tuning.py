import pytest
import torch

from worker.kernels.decode_tuning import DecodeTuning, choose_num_splits, choose_tuning


def test_default_tuning_is_legal_and_fits_shared_memory():
    for rows in (1, 2, 8, 32, 64, 256):
        for num_kv_heads in (1, 8):
            for head_dim in (64, 80, 128, 256):
                for dtype in (torch.float16, torch.float32):
                    tuning = choose_tuning(rows, num_kv_heads, head_dim, dtype)
                    assert tuning.split_length % tuning.tile == 0
                    assert tuning.tile >= 16
                    tile_bytes = 2 * tuning.tile * max(128, head_dim) * dtype.itemsize
                    assert (tuning.stages - 1) * tile_bytes <= 128 << 10
    assert choose_tuning(1, 8, 128) == DecodeTuning(tile=32, warps=2, stages=3, split_length=64)


@pytest.mark.parametrize(
    ("rows", "num_kv_heads", "capacity", "split_length", "splits"),
    [
        (1, 8, 512, 32, 16),  # all that the table has
        (1, 8, 40_960, 32, 66),  # what fills 132 processors four times over
        (256, 8, 4096, 512, 8),
        (256, 8, 40_960, 512, 8),
        (256, 8, 64, 512, 1),
    ],
)
def test_num_splits(rows, num_kv_heads, capacity, split_length, splits):
    assert choose_num_splits(rows, num_kv_heads, capacity, 132, split_length) == splits

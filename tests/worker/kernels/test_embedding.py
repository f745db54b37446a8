import pytest
import torch

from tests.worker.kernels.closeness import DTYPES
from worker.kernels.embedding import embed_last_tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("rows", "hidden"),
    [*((rows, 576) for rows in (1, 2, 7, 8, 9, 31, 33, 255, 256)), (3, 1024), (2, 4096), (2, 5)],
)
def test_each_row_is_its_slots_last_token(rows, hidden, slot_dtype, dtype, device):
    generator = torch.Generator().manual_seed(rows)
    table = torch.randn(100, hidden, generator=generator).to(device, dtype)
    last_tokens = torch.randint(100, (300,), generator=generator).to(device)
    slots = torch.randperm(300, generator=generator)[:rows].to(device, slot_dtype)
    result = embed_last_tokens(slots, last_tokens, table)
    assert torch.equal(result, table[last_tokens[slots.long()]])

import pytest
import torch

from tests.worker.tiny_models import CPU
from worker.decode_inputs import DecodeInputs
from worker.slot_tables import SlotTables

open_rows = pytest.importorskip("worker.kernels.decode_rows").open_rows
BLOCK_SIZE, WIDTH, PAD_BLOCK = 16, 300, 4000


@pytest.mark.parametrize("num_rows", [1, 7, 33])
def test_same_as_by_torch(device: torch.device, num_rows: int):
    generator = torch.Generator().manual_seed(num_rows)
    num_slots = 40
    tables = torch.randint(0, PAD_BLOCK, (num_slots + 1, WIDTH), generator=generator).int()
    last_tokens = torch.randint(0, 50_000, (num_slots + 1,), generator=generator)
    slots = torch.randperm(num_slots, generator=generator)[:num_rows].int()
    positions = torch.randint(0, WIDTH * BLOCK_SIZE, (num_rows,), generator=generator).int()
    slots[-1], positions[-1] = num_slots, -1  # padding
    row_tables = torch.full((num_rows, WIDTH), 7, dtype=torch.int32, device=device)
    opened = open_rows(
        slots.to(device),
        positions.to(device),
        last_tokens.to(device),
        tables.to(device),
        row_tables=row_tables,
        block_size=BLOCK_SIZE,
    )
    state = SlotTables(
        last_tokens.to(CPU), max_blocks=WIDTH, block_size=BLOCK_SIZE, pad_block=PAD_BLOCK
    )
    state.tables.copy_(tables)
    inputs = DecodeInputs(state, max_rows=num_rows)
    inputs.fill(num_rows, 0, slots[:-1].numpy(), positions[:-1].numpy())
    expected = inputs.open(num_rows)
    for found, wanted in zip(opened, expected[:4], strict=True):
        assert found.dtype == wanted.dtype
        assert found.tolist() == wanted.tolist()
    for row, length in enumerate(expected.lengths.tolist()):
        used = max(1, -(-length // BLOCK_SIZE))
        found = row_tables[row].tolist()
        assert found[:used] == expected.block_tables[row, :used].tolist()
        assert found[used:] == [7] * (WIDTH - used)

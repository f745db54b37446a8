import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("triton")

from tests.worker.kernels.closeness import DTYPES, assert_as_close
from worker.kernels.products import Scratch, product
from worker.product_table import Gemv, Setting, Tiles

GEMVS = [Gemv(1, 64, 1), Gemv(4, 64, 1), Gemv(8, 256, 4)]
TILES = [
    Tiles(16, 16, 64, 1, 4, 2),
    Tiles(16, 16, 32, 8, 4, 2),
    Tiles(64, 16, 32, 3, 4, 3),
    Tiles(32, 32, 64, 4, 4, 3),
]


def draw(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device):
    torch.manual_seed(rows + outputs)
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = torch.randn(outputs, inputs, device=device).to(dtype)
    return x, weight, torch.randn(outputs, device=device).to(dtype)


def scratch_for(setting: Setting, rows: int, outputs: int, device: torch.device) -> Scratch:
    """Return scratch of exactly the size that the setting asks for."""
    if isinstance(setting, Gemv):
        return Scratch.allocate(0, 0, device)
    return Scratch.allocate(
        setting.num_sums(rows, outputs), setting.num_tiles(rows, outputs), device
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("setting", "rows"),
    [(gemv, rows) for gemv in GEMVS for rows in (1, 3, 8)]
    + [(tiles, rows) for tiles in TILES for rows in (1, 16, 37)],
    ids=str,
)
def test_as_close_as_plain(
    setting: Setting, rows: int, has_bias: bool, dtype: torch.dtype, device: torch.device
):
    # 20 outputs fill no whole number of large blocks.
    x, weight, bias = draw(rows, 20, 256, dtype, device)
    offset = bias if has_bias else None
    scratch = scratch_for(setting, rows, 20, device)
    y = product(x, weight, offset, setting, scratch)
    exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    assert_as_close(y, F.linear(x, weight, offset), exact)


@pytest.mark.parametrize("setting", [GEMVS[1], TILES[2]], ids=str)
def test_a_row_depends_on_no_other(setting: Setting, device: torch.device):
    x, weight, _ = draw(8, 20, 256, torch.float16, device)
    scratch = scratch_for(setting, 8, 20, device)
    whole = product(x, weight, None, setting, scratch)
    others = x.clone()
    others[0] = torch.nan
    others[2:] = 1e4
    assert torch.equal(product(others, weight, None, setting, scratch)[1], whole[1])


@pytest.mark.parametrize("setting", TILES, ids=str)
def test_a_product_leaves_the_scratch_ready_for_the_next(setting: Tiles, device: torch.device):
    x, weight, _ = draw(20, 20, 256, torch.float16, device)
    scratch = scratch_for(setting, 20, 20, device)
    first = product(x, weight, None, setting, scratch)
    assert scratch.tickets.tolist() == [0] * len(scratch.tickets)
    scratch.sums.fill_(torch.nan)
    assert torch.equal(product(x, weight, None, setting, scratch), first)


def test_rows_may_lie_apart(device: torch.device):
    x, weight, _ = draw(4, 16, 128, torch.float16, device)
    apart = torch.full((4, 256), torch.nan, dtype=x.dtype, device=device)[:, :128]
    apart.copy_(x)
    for setting in (Gemv(4, 64, 1), Tiles(16, 16, 64, 2, 4, 2)):
        scratch = scratch_for(setting, 4, 16, device)
        expected = product(x, weight, None, setting, scratch)
        assert torch.equal(product(apart, weight, None, setting, scratch), expected)

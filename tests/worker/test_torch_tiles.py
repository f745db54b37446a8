import pytest
import torch

from benchmarks.attention_cases import plain_attention
from worker.attention.base import LayerAttention
from worker.attention.torch_tiles import (
    TileMasks,
    attend_fresh,
    attend_tiles,
    softmax_beside_sinks,
)

LIKE = torch.zeros(1)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("worker.attention.torch_tiles._TILE_ROWS", 4)


def seen(mask: torch.Tensor) -> list[str]:
    assert set(mask.unique().tolist()) <= {0.0, float("-inf")}
    return ["".join("0" if column == 0 else "." for column in row) for row in mask]


def test_masks():
    masks = TileMasks(LIKE)
    assert seen(masks.mask(None, 2, 2)) == ["0.", "00"]
    assert seen(masks.mask(None, 3, 5)) == ["000..", "0000.", "00000"]
    assert seen(masks.mask(2, 3, 5)) == [".00..", "..00.", "...00"]
    assert seen(masks.mask(1, 2, 2)) == ["0.", ".0"]
    assert seen(masks.mask(9, 1, 3)) == ["000"]
    assert seen(masks.mask(2, 4, 4)) == ["0...", "00..", ".00.", "..00"]


def test_masks_are_kept_until_they_are_too_narrow():
    masks = TileMasks(LIKE)
    first = masks.mask(3, 4, 9)
    assert masks.mask(3, 4, 9).data_ptr() == first.data_ptr()
    assert masks.mask(3, 4, 10).shape == (4, 10)


def test_weights_beside_sinks_add_up_to_less_than_one():
    weights = softmax_beside_sinks(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0]]))
    torch.testing.assert_close(weights, torch.full((1, 2), 1 / 3))


@pytest.mark.parametrize("window", [1, 3, 11, 50, None])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_chunks(window: int | None, has_sinks: bool):
    generator = torch.Generator().manual_seed(0)
    contents = torch.randn(20, 2, 2, 8, generator=generator)
    query = torch.randn(20, 6, 8, generator=generator)
    sinks = torch.linspace(-3, 3, 6) if has_sinks else None
    how, masks = LayerAttention(0.4, window), TileMasks(LIKE)
    expected = plain_attention(query, contents, 0, torch.float64, how=how, sinks=sinks)
    expected = expected.view(query.shape)
    output = torch.full_like(query, float("nan"))
    attend_fresh(query, contents, output, how, sinks, masks)
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=0)
    # The rest after 9 tokens, of which no more are given than the window reaches.
    first_key = 0 if window is None else max(0, 9 - window)
    keys, values = contents[first_key:].permute(1, 2, 0, 3)
    output = torch.full_like(query, float("nan"))[9:]
    attend_tiles(query[9:], keys, values, output, how, sinks, masks, start=9, first_key=first_key)
    torch.testing.assert_close(output.double(), expected[9:], atol=2e-6, rtol=0)

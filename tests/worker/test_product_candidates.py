import pytest

from worker.product_candidates import candidates
from worker.product_table import Gemv, Tiles
from worker.tune import KNOWN, ROWS, distinct_shapes


@pytest.mark.parametrize("shape", distinct_shapes([*KNOWN.values()], 2), ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_candidates_fit_and_differ(shape, rows: int):
    some = list(candidates(rows, shape.outputs, shape.inputs, processors=132))
    assert len(set(some)) == len(some)
    assert all(setting.fits(rows, shape.outputs, shape.inputs) for setting in some)
    assert 10 <= len(some) <= 200


def test_which_kernel_for_how_many_rows():
    kinds = {
        rows: {type(setting) for setting in candidates(rows, 1024, 2048, processors=132)}
        for rows in (1, 8, 9)
    }
    assert kinds == {1: {Gemv}, 8: {Gemv, Tiles}, 9: {Tiles}}


def test_few_outputs_are_split():
    tiles = [
        setting
        for setting in candidates(16, 1024, 2048, processors=132)
        if isinstance(setting, Tiles) and (setting.block_n, setting.block_k) == (64, 128)
    ]
    # 16 tiles: 8 splits give about one program a processor, 16 about two.
    assert sorted({setting.split for setting in tiles}) == [1, 8, 16]

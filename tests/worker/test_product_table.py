import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigError
from worker.product_table import (
    Gemv,
    ProductEntry,
    ProductTable,
    Tiles,
    parse_table,
    read_table,
)

GEMV = Gemv(4, 1024, 4)
TILES = Tiles(64, 16, 128, 8, 4, 4, pdl=True)
TABLE = ProductTable(
    "NVIDIA H200",
    "bfloat16",
    {
        (1024, 3072): ProductEntry((1, 8, 256), (GEMV, TILES, None)),
        (4096, 1024): ProductEntry((4,), (GEMV,)),
    },
)


def test_a_table_is_read_as_it_was_written():
    assert parse_table(TABLE.to_json([{"rows": 1, "own_us": 2.5}])) == TABLE


def test_the_next_larger_number_of_rows_counts():
    entry = TABLE.entry(1024, 3072)
    chosen = [entry.choose(rows) for rows in (0, 1, 2, 8, 9, 256, 257)]
    assert chosen == [None, GEMV, TILES, TILES, None, None, None]
    assert TABLE.entry(1024, 1024).choose(1) is None


def test_what_fits():
    assert [GEMV.fits(rows, 100, 3072) for rows in (0, 1, 8, 9)] == [False, True, True, False]
    assert not GEMV.fits(1, 100, 1536)
    assert not GEMV.fits(1, 0, 3072)
    assert TILES.fits(1000, 100, 1024)
    assert not TILES.fits(1, 100, 896)  # 7 blocks for 8 programs
    assert not Tiles(128, 128, 128, 1, 8, 4).fits(1, 128, 1024)  # 256 KiB of shared memory


def test_an_entry_that_cannot_be_is_the_librarys():
    entry = ProductEntry((1, 8, 16), (GEMV, TILES, GEMV))
    assert entry.fitting(100, 1024) == ProductEntry((1, 8, 16), (GEMV, TILES, None))
    assert entry.fitting(100, 896) == ProductEntry((1, 8, 16), (None, None, None))


def test_how_much_scratch():
    assert (TILES.num_tiles(17, 65), TILES.num_sums(17, 65)) == (4, 4 * 8 * 64 * 16)
    assert Tiles(64, 16, 128, 1, 4, 4).num_sums(17, 65) == 0


def changed(**changes: Any) -> str:
    """Return a table's text with other values in its one setting."""
    setting = {"kernel": "gemv", "block_n": 4, "block_k": 64, "warps": 1, "pdl": False, **changes}
    product = {"outputs": 8, "inputs": 64, "rows": {"1": setting}}
    return json.dumps({"format": 1, "gpu": "G", "dtype": "float16", "products": [product]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting"),
        ("[]", "its format is not 1"),
        ('{"format": 2}', "its format is not 1"),
        ('{"format": 1}', "a field is missing .*'products'"),
        (changed(kernel="magic"), "there is no kernel magic, only gemv, tiles"),
        (changed(block_n=3), "block_n 3 is not a power of two"),
        (changed(block_n=True), "block_n True is not a positive whole number"),
        (changed(warps=64), "warps 64 is more than 16"),
        (changed(stages=2), "a field is missing or of another kind .*stages"),
    ],
)
def test_damaged_tables(tmp_path: Path, text: str, words: str):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"table.json is not a table of products: .*{words}"):
        read_table(path)

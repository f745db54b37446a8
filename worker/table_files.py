"""Where tables of products are kept: those that come with Tokenwire, and the user's own.

A GPU and dtype have one file each, of the same name, in `worker/tables` and in the user's cache,
where `python -m worker.tune` writes. The user's entries count before those that came along.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from worker.product_table import ProductEntry, ProductTable, read_table

SHIPPED = Path(__file__).parent / "tables"


def user_tables(cache: Path) -> Path:
    """Return the directory of the user's own tables."""
    return cache / "products"


def file_name(gpu: str, dtype: str) -> str:
    """Return the name of a GPU's table."""
    return re.sub(r"[^a-z0-9]+", "-", f"{gpu} {dtype}".lower()) + ".json"


def find_table(gpu: str, dtype: str, directories: Sequence[Path]) -> ProductTable:
    """Return what the directories' tables know about a GPU, maybe nothing; the later count.

    Raises ConfigError naming a file that is no table.
    """
    entries: dict[tuple[int, int], ProductEntry] = {}
    for directory in directories:
        path = directory / file_name(gpu, dtype)
        if path.is_file():
            entries.update(read_table(path).entries)
    return ProductTable(gpu, dtype, entries)


def shipped_tables() -> list[ProductTable]:
    """Return all tables that come with Tokenwire."""
    return [read_table(path) for path in sorted(SHIPPED.glob("*.json"))]

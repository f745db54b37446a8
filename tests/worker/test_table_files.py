from pathlib import Path

from worker.product_table import Gemv, ProductEntry, ProductTable
from worker.table_files import SHIPPED, file_name, find_table, shipped_tables, user_tables


def save(directory: Path, entries: dict[tuple[int, int], ProductEntry]) -> None:
    directory.mkdir()
    table = ProductTable("NVIDIA H200", "bfloat16", entries)
    (directory / file_name(table.gpu, table.dtype)).write_text(table.to_json())


def test_names():
    assert file_name("NVIDIA H100 80GB HBM3", "float16") == "nvidia-h100-80gb-hbm3-float16.json"
    assert user_tables(Path("/c")) == Path("/c/products")


def test_the_users_entries_count_first(tmp_path: Path):
    ours, users = (ProductEntry((1,), (Gemv(size, 64, 1),)) for size in (1, 2))
    save(tmp_path / "shipped", {(8, 64): ours, (16, 64): ours})
    save(tmp_path / "user", {(16, 64): users, (32, 64): users})
    directories = [tmp_path / "shipped", tmp_path / "user", tmp_path / "none"]
    table = find_table("NVIDIA H200", "bfloat16", directories)
    assert table.entries == {(8, 64): ours, (16, 64): users, (32, 64): users}
    assert find_table("NVIDIA H200", "float16", directories).entries == {}


def test_the_shipped_tables_are_in_order():
    for table in shipped_tables():
        assert (SHIPPED / file_name(table.gpu, table.dtype)).is_file()
        for (outputs, inputs), entry in table.entries.items():
            assert entry.fitting(outputs, inputs) == entry, (outputs, inputs)

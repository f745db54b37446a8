"""Which kernel multiplies: by the product's shape and the number of rows, as measured before.

A table holds, for one GPU and dtype, the products that somebody has measured with `worker.tune`:

    {"format": 1, "gpu": "NVIDIA H200", "dtype": "bfloat16", "products": [
        {"outputs": 4096, "inputs": 1024, "rows": {
            "1": {"kernel": "gemv", "block_n": 4, "block_k": 1024, "warps": 4, "pdl": false},
            "256": null}}]}

The entry of the next larger number of rows counts; null, and whatever is not in the table, is the
library's product. Imports neither torch nor Triton.
"""

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError

FORMAT = 1
MAX_GEMV_ROWS = 8
_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True, slots=True)
class Gemv:
    """Settings of the kernel without tensor cores. Blocks are powers of two."""

    block_n: int
    """Outputs a program computes."""
    block_k: int
    """Inputs it reads of each at a time; divides their number."""
    warps: int
    pdl: bool = False
    """Starts while the kernel before it ends."""

    def fits(self, rows: int, outputs: int, inputs: int) -> bool:
        """Whether this can compute such a product at all."""
        return 0 < rows <= MAX_GEMV_ROWS and outputs > 0 and inputs % self.block_k == 0


@dataclass(frozen=True, slots=True)
class Tiles:
    """Settings of the kernel on tensor cores. Blocks are powers of two."""

    block_n: int
    """Outputs a program computes."""
    block_m: int
    """Rows it computes them for."""
    block_k: int
    """Inputs it reads at a time; divides their number."""
    split: int
    """Programs that share one tile's inputs."""
    warps: int
    stages: int
    """Blocks of inputs in flight or in use."""
    pdl: bool = False
    """Starts while the kernel before it ends."""

    def fits(self, rows: int, outputs: int, inputs: int) -> bool:
        """Whether this can compute such a product at all."""
        shared = 2 * (self.block_n + self.block_m) * self.block_k * self.stages
        return (
            rows > 0
            and outputs > 0
            and inputs % self.block_k == 0
            and self.split <= inputs // self.block_k
            and shared <= _SHARED_BYTES
        )

    def num_tiles(self, rows: int, outputs: int) -> int:
        """Return how many tiles the result has."""
        return -(-rows // self.block_m) * -(-outputs // self.block_n)

    def num_sums(self, rows: int, outputs: int) -> int:
        """Return how many partial sums the programs of all tiles leave for each other."""
        tile = self.block_n * self.block_m
        return 0 if self.split == 1 else self.num_tiles(rows, outputs) * self.split * tile


Setting = Gemv | Tiles

_LARGEST = {
    "block_n": 256,
    "block_m": 256,
    "block_k": 8192,
    "split": 256,
    "warps": 16,
    "stages": 16,
}
"""What a table may ask for, so that a wrong one is told from one that cannot be launched."""

_KERNELS: Mapping[str, type[Gemv] | type[Tiles]] = {"gemv": Gemv, "tiles": Tiles}


@dataclass(frozen=True, slots=True)
class ProductEntry:
    """What is known about one product, by the number of rows, ascending."""

    rows: tuple[int, ...]
    settings: tuple[Setting | None, ...]
    """As many; None is the library's product."""

    def choose(self, rows: int) -> Setting | None:
        """Return the setting for so many rows, None for the library's product."""
        at = bisect.bisect_left(self.rows, rows)
        return self.settings[at] if rows and at < len(self.rows) else None

    def fitting(self, outputs: int, inputs: int) -> "ProductEntry":
        """Return the entry with the library's product where a setting cannot compute it."""
        return ProductEntry(
            self.rows,
            tuple(
                setting if setting and setting.fits(rows, outputs, inputs) else None
                for rows, setting in zip(self.rows, self.settings, strict=True)
            ),
        )


@dataclass(frozen=True, slots=True)
class ProductTable:
    """All that is known about products on one GPU in one dtype."""

    gpu: str
    """As the driver names it."""
    dtype: str
    entries: Mapping[tuple[int, int], ProductEntry]
    """By outputs and inputs."""

    def entry(self, outputs: int, inputs: int) -> ProductEntry:
        """Return what is known about a product, maybe nothing."""
        return self.entries.get((outputs, inputs), ProductEntry((), ()))

    def to_json(self, measurements: Sequence[Mapping[str, object]] = ()) -> str:
        """Return the table as text. `measurements` are kept for readers; nothing uses them."""
        products = [
            {
                "outputs": outputs,
                "inputs": inputs,
                "rows": {
                    str(rows): _describe(setting)
                    for rows, setting in zip(entry.rows, entry.settings, strict=True)
                },
            }
            for (outputs, inputs), entry in sorted(self.entries.items())
        ]
        table = {"format": FORMAT, "gpu": self.gpu, "dtype": self.dtype, "products": products}
        if measurements:
            table["measurements"] = list(measurements)
        return json.dumps(table, indent=1) + "\n"


def read_table(path: Path) -> ProductTable:
    """Read a table. Raises ConfigError naming the file if it is not one."""
    try:
        return parse_table(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a table of products: {error}; remove it, or write it anew with "
            "python -m worker.tune."
        ) from error


def parse_table(text: str) -> ProductTable:
    """Return the table that a text holds. Raises ValueError saying what is wrong."""
    raw = json.loads(text)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    try:
        entries = {
            (_number(product, "outputs"), _number(product, "inputs")): _parse_entry(product["rows"])
            for product in raw["products"]
        }
        gpu, dtype = str(raw["gpu"]), str(raw["dtype"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or of another kind ({error})") from error
    return ProductTable(gpu, dtype, entries)


def _describe(setting: Setting | None) -> dict[str, Any] | None:
    if setting is None:
        return None
    return {"kernel": "gemv" if isinstance(setting, Gemv) else "tiles", **asdict(setting)}


def _parse_entry(raw: Mapping[str, Any]) -> ProductEntry:
    settings = sorted((int(rows), _parse_setting(setting)) for rows, setting in raw.items())
    return ProductEntry(tuple(rows for rows, _ in settings), tuple(s for _, s in settings))


def _parse_setting(raw: Mapping[str, Any] | None) -> Setting | None:
    if raw is None:
        return None
    kind = _KERNELS.get(raw["kernel"])
    if kind is None:
        raise ValueError(f"there is no kernel {raw['kernel']}, only {', '.join(_KERNELS)}")
    numbers = {name: _number(raw, name) for name in raw if name not in ("kernel", "pdl")}
    setting = kind(**numbers, pdl=raw["pdl"] is True)
    for name, value in numbers.items():
        if name not in ("split", "stages") and value & (value - 1):
            raise ValueError(f"{name} {value} is not a power of two")
        if value > _LARGEST[name]:
            raise ValueError(f"{name} {value} is more than {_LARGEST[name]}")
    return setting


def _number(raw: Mapping[str, Any], name: str) -> int:
    value = raw[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} {value} is not a positive whole number")
    return value

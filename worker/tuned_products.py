"""Hands out the products that a table knows to be faster than the library's.

Needs Triton. One `TunedProducts` serves all layers of a rank: they run one after the other on one
stream, so they share the scratch of the kernels.
"""

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from torch import Tensor

from worker.kernels.products import Launch, Scratch, prepare_launch, product
from worker.layers.linear import multiply
from worker.product_table import ProductEntry, ProductTable, Tiles

log = logging.getLogger(__name__)


class TunedProduct:
    """Our kernel or the library's, by the number of rows."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        entry: ProductEntry,
        scratch: Scratch,
        out_dtype: torch.dtype,
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._out_dtype = out_dtype
        self._entry = entry
        self._scratch = scratch

    def __call__(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias."""
        setting = self._entry.choose(len(x))
        if setting is None:
            return multiply(x, self._weight, self._bias, self._out_dtype)
        out = x.new_empty(len(x), len(self._weight), dtype=self._out_dtype)
        return product(x, self._weight, self._bias, setting, self._scratch, out)

    def launches(self) -> list[Launch]:
        """Return a launch of each of the entry's kernels, on rows of zeros."""
        launches = []
        for rows, setting in zip(self._entry.rows, self._entry.settings, strict=True):
            if setting is not None:
                x = self._weight.new_zeros(rows, self._weight.shape[1])
                out = x.new_empty(rows, len(self._weight), dtype=self._out_dtype)
                launches.append(
                    prepare_launch(x, self._weight, self._bias, setting, self._scratch, out)
                )
        return launches


class TunedProducts:
    """Chooses products by a table, and makes their kernels ready."""

    def __init__(self, table: ProductTable, device: torch.device) -> None:
        self._table = table
        sums, tiles = scratch_sizes(table)
        self._scratch = Scratch.allocate(sums, tiles, device)
        self._first_of_kind: dict[tuple[int, int, bool, torch.dtype], TunedProduct] = {}

    def choose(
        self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> TunedProduct | None:
        """Return the product for a weight, None where the table knows none better."""
        outputs, inputs = weight.shape
        entry = self._table.entry(outputs, inputs).fitting(outputs, inputs)
        if not any(entry.settings) or not self._suits(weight):
            return None
        tuned = TunedProduct(weight, bias, entry, self._scratch, out_dtype)
        self._first_of_kind.setdefault((outputs, inputs, bias is not None, out_dtype), tuned)
        return tuned

    def warm(self) -> None:
        """Compile and load the kernels of all products handed out: no step waits for that later."""
        started = time.monotonic()
        launches = [launch for tuned in self._first_of_kind.values() for launch in tuned.launches()]
        with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads):
            for launch in launches:
                launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
        for launch in launches:
            launch.kernel[launch.grid](*launch.arguments, **launch.options)
        log.info(
            "products tuned=%d kernels=%d seconds=%.1f",
            *(len(self._first_of_kind), len(launches), time.monotonic() - started),
        )

    def _suits(self, weight: Tensor) -> bool:
        dtype = str(weight.dtype).removeprefix("torch.")
        # Loads are of 16 bytes, which a slice of a table may not start at.
        return dtype == self._table.dtype and weight.is_contiguous() and weight.data_ptr() % 16 == 0


def scratch_sizes(table: ProductTable) -> tuple[int, int]:
    """Return how many partial sums and tickets the table's products need at most."""
    most_sums = most_tiles = 0
    for (outputs, _), entry in table.entries.items():
        for rows, setting in zip(entry.rows, entry.settings, strict=True):
            if isinstance(setting, Tiles):
                most_sums = max(most_sums, setting.num_sums(rows, outputs))
                most_tiles = max(most_tiles, setting.num_tiles(rows, outputs))
    return most_sums, most_tiles

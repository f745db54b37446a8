"""Says which kernel each matrix product of a model will run, for `--explain-kernels`.

Reads no weights. Without a GPU it explains every table that comes with Tokenwire.
"""

import os
from pathlib import Path

import torch

from protocol.errors import ConfigError
from protocol.user_cache import user_cache_dir
from worker.config import WorkerConfig
from worker.model_config import ModelConfig
from worker.model_files import read_model_config
from worker.product_shapes import ProductShape, config_sizes, rank_products
from worker.product_table import ProductTable, Setting, Tiles
from worker.quantization import choose_storage
from worker.table_files import SHIPPED, find_table, shipped_tables, user_tables


def explain_kernels(config: WorkerConfig) -> str:
    """Return what a worker's flags come to. Raises ConfigError, ModelFileError."""
    if not config.model:
        raise ConfigError("--explain-kernels needs a --model.")
    model = read_model_config(Path(config.model))
    model.require_legal_tp(config.tp)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    if torch.cuda.is_available() and config.device != "cpu":
        directories = (SHIPPED, user_tables(user_cache_dir(os.environ)))
        tables = [find_table(torch.cuda.get_device_name(), dtype, directories)]
    else:
        tables = [table for table in shipped_tables() if table.dtype == dtype]
    if not tables:
        return f"There is no table of products in {dtype}: all are the library's."
    parts = [explain_products(model, tp=config.tp, table=table) for table in tables]
    storage = choose_storage(config.quantization, model.quantization)
    if storage != "none":
        parts.insert(0, f"Products inside the layers are in {storage}: tables are for head alone.")
    return "\n\n".join(parts)


def explain_products(config: ModelConfig, *, tp: int, table: ProductTable) -> str:
    """Return a table of rank 0's products and choices. `tp` must be legal for the model."""
    lines = [f"{table.gpu}, {table.dtype}, tp {tp}: y = x · weightᵀ, weight [outputs, inputs]"]
    lines.append(f"{'product':10}{'outputs':>8}{'inputs':>8}  {'rows':10}kernel")
    for shape in rank_products(config_sizes(config), tp=tp):
        lines += _explain(shape, table)
    return "\n".join(lines)


def _explain(shape: ProductShape, table: ProductTable) -> list[str]:
    entry = table.entry(shape.outputs, shape.inputs).fitting(shape.outputs, shape.inputs)
    limits: list[int | str] = [*entry.rows, ""]
    settings = [*entry.settings, None]
    lines: list[str] = []
    first = 1
    for at, (limit, setting) in enumerate(zip(limits, settings, strict=True)):
        if setting in settings[at + 1 : at + 2]:
            continue  # said once, with the last number of rows that it is for
        rows = str(first) if first == limit else f"{first}-{limit}"
        head = "" if lines else f"{shape.name:10}{shape.outputs:8}{shape.inputs:8}"
        lines.append(f"{head:26}  {rows:10}{_name(setting)}")
        if isinstance(limit, int):
            first = limit + 1
    return lines


def _name(setting: Setting | None) -> str:
    if setting is None:
        return "library"
    block = f"{setting.block_n} outputs x {setting.block_k} inputs"
    pdl = ", starts early" if setting.pdl else ""
    if isinstance(setting, Tiles):
        return (
            f"tiles of {block} x {setting.block_m} rows, split {setting.split}, "
            f"warps {setting.warps}, stages {setting.stages}{pdl}"
        )
    return f"gemv of {block}, warps {setting.warps}{pdl}"

import pytest

from protocol.errors import ConfigError
from protocol.lifecycle import ProcessConfig
from tests.worker.tiny_models import save_llama
from worker.config import WorkerConfig
from worker.kernel_explanation import explain_kernels, explain_products
from worker.model_files import read_model_config
from worker.product_table import Gemv, ProductEntry, ProductTable, Tiles

PROCESS = ProcessConfig(run_dir="unused")


def test_what_a_table_comes_to(tmp_path):
    save_llama(tmp_path)
    gemv, tiles = Gemv(4, 16, 1), Tiles(64, 16, 16, 3, 4, 5, pdl=True)
    table = ProductTable(
        "GPU X",
        "bfloat16",
        {
            (80, 48): ProductEntry((1, 2, 4, 16), (gemv, gemv, None, tiles)),
            (48, 80): ProductEntry((1,), (Gemv(4, 64, 1),)),  # 64 does not divide 80
        },
    )
    text = explain_products(read_model_config(tmp_path), tp=1, table=table)
    assert text.splitlines() == [
        "GPU X, bfloat16, tp 1: y = x · weightᵀ, weight [outputs, inputs]",
        "product    outputs  inputs  rows      kernel",
        "qkv             80      48  1-2       gemv of 4 outputs x 16 inputs, warps 1",
        "                            3-4       library",
        "                            5-16      tiles of 64 outputs x 16 inputs x 16 rows, split 3, "
        "warps 4, stages 5, starts early",
        "                            17-       library",
        "output          48      48  1-        library",
        "gate_up        160      48  1-        library",
        "down            48      80  1-        library",
        "head           131      48  1-        library",
    ]


def test_flags_that_do_not_fit(tmp_path):
    save_llama(tmp_path)
    with pytest.raises(ConfigError, match="--tp 4"):
        explain_kernels(WorkerConfig(process=PROCESS, model=str(tmp_path), tp=4))
    with pytest.raises(ConfigError, match="needs a --model"):
        explain_kernels(WorkerConfig(process=PROCESS, fake_workers=True))

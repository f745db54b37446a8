from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import ConfigError, ModelFileError
from protocol.lifecycle import ProcessConfig
from tests.worker.plan_builder import execute, make_join, make_plan
from tests.worker.quantized_models import awq, save_quantized
from tests.worker.tiny_models import save_llama
from worker.config import WorkerConfig
from worker.model_setup import build_model_runner, num_threads

AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "group_size": 32}
PROCESS = ProcessConfig(run_dir="unused")


@pytest.fixture(autouse=True)
def _restore_torch():
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)


def test_defaults_come_from_model_and_machine(tmp_path: Path):
    save_llama(tmp_path)
    config = WorkerConfig(process=PROCESS, model=str(tmp_path), num_blocks=20, threads=1)
    runner = build_model_runner(config)
    facts = runner.facts
    assert (facts.max_model_len, facts.vocab_size) == (128, 131)
    assert (facts.block_size, facts.num_blocks, facts.slots) == (16, 20, 64)
    assert facts.back_end == "torch"
    assert torch.get_num_threads() == 1
    output = execute(runner, make_plan(1, joins=[make_join(0, [1], [0])], chunks=[(0, 0, 1, 1)]))
    assert output.counts.tolist() == [1]


def test_dummy_weights(tmp_path: Path):
    save_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    arguments = {"process": PROCESS, "model": str(tmp_path), "num_blocks": 4}
    with pytest.raises(ModelFileError, match="holds neither"):
        build_model_runner(WorkerConfig(**arguments))
    runner = build_model_runner(WorkerConfig(**arguments, load_format="dummy", dtype="bfloat16"))
    assert runner.facts.num_blocks == 4


def test_a_cache_in_fp8(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch):
    save_llama(tmp_path)
    block_bytes = 2 * 3 * 2 * 8 * 16  # keys and values, layers, heads, their size, positions
    monkeypatch.setattr("worker.model_setup.available_memory_bytes", lambda: 4000 * block_bytes)
    arguments = {"process": PROCESS, "model": str(tmp_path), "threads": 1}
    swap = 7.5 * block_bytes / 2**30
    facts = {}
    for flag, dtype in (("auto", "bfloat16"), ("fp8", "float8_e4m3fn")):
        with caplog.at_level("INFO"):
            runner = build_model_runner(
                WorkerConfig(
                    **arguments, dtype="bfloat16", kv_cache_dtype=flag, swap_space_gib=swap
                )
            )
        facts[flag] = runner.facts.num_blocks, runner.facts.host_blocks
        assert (
            f"dtype={dtype}"
            in [r.message for r in caplog.records if "cache blocks" in r.message][-1]
        )
        plan = make_plan(1, joins=[make_join(0, [1, 2, 3], [0])], chunks=[(0, 0, 3, 1)])
        assert execute(runner, plan).counts.tolist() == [1]
    assert facts == {"auto": (500, 3), "fp8": (1000, 7)}


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"attention": "fa3"}, "--attention fa3"),
        ({"tp": 4}, r"--tp 4 .* 6 query heads, 2 KV heads .* size 80; legal are 1, 2\."),
    ],
)
def test_flags_that_do_not_fit(tmp_path: Path, flags: dict[str, Any], word: str):
    save_llama(tmp_path)
    with pytest.raises(ConfigError, match=word):
        build_model_runner(WorkerConfig(process=PROCESS, model=str(tmp_path), **flags))


@pytest.mark.parametrize(
    ("flags", "device", "threads", "warnings"),
    [
        ({"tp": 1}, "cpu", 4, 0),
        ({"tp": 3}, "cpu", 1, 0),
        ({"tp": 5}, "cpu", 1, 1),
        ({"tp": 5, "threads": 2}, "cpu", 2, 1),
        ({"tp": 5, "rank": 1}, "cpu", 1, 0),
        ({"tp": 5}, "cuda", 1, 0),
    ],
)
def test_each_rank_has_its_share_of_the_cores_or_a_warning(
    flags: dict[str, int], device: str, threads: int, warnings: int, monkeypatch, caplog
):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    config = WorkerConfig(process=PROCESS, model="m", **flags)
    assert num_threads(config, torch.device(device)) == threads
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings


def test_products_in_fewer_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save_quantized(tmp_path, awq(32), AWQ)
    arguments = {"process": PROCESS, "model": str(tmp_path), "num_blocks": 4, "threads": 1}
    with pytest.raises(ConfigError, match="--quantization fp8 is not for a checkpoint in 4 bits"):
        build_model_runner(WorkerConfig(**arguments, quantization="fp8"))
    for flag, storage in (("auto", "int4"), ("none", "none")):
        caplog.clear()
        with caplog.at_level("INFO"):
            runner = build_model_runner(WorkerConfig(**arguments, quantization=flag))
        assert f"quantization={storage} " in caplog.text
        plan = make_plan(1, joins=[make_join(0, [1], [0])], chunks=[(0, 0, 1, 1)])
        assert execute(runner, plan).counts.tolist() == [1]

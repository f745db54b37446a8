"""`launch.py --plan`, which starts nothing."""

import dataclasses
import json
from pathlib import Path

import launch
from tests.worker.tiny_models import save_llama

GIB = 1 << 30


def test_what_would_be_started(cli, tmp_path: Path):
    save_llama(tmp_path)
    code, out, _ = cli("--plan", "--model", str(tmp_path), "--device", "cpu")
    assert code == 0
    described = json.loads(out)
    assert described["run"]["max_num_seqs"] == 64
    assert described["model"]["architecture"] == "LlamaForCausalLM"
    assert "memory" not in described


def test_what_a_gpus_memory_would_go_to(tmp_path: Path, monkeypatch):
    save_llama(tmp_path)
    monkeypatch.setattr(launch, "gpu_memory", lambda: [80 * GIB, 40 * GIB])
    config = launch.LaunchConfig(
        model=str(tmp_path), device="cuda", max_num_batched_tokens=2048, max_num_seqs=256
    )
    memory = json.loads(launch.describe(config))["memory"]
    assert [line.split("  ")[0] for line in memory] == [
        "weights",
        "step's tensors",
        "CUDA graphs",
        "driver and others",
        "KV cache",
        "left free",
        "tokens in cache",
    ]
    # Of the smaller GPU, of which a tenth is left free.
    assert memory[-2].split() == ["left", "free", "4.00", "GiB"]
    tokens = {
        flag: int(
            json.loads(launch.describe(dataclasses.replace(config, kv_cache_dtype=flag)))["memory"][
                -1
            ].split()[-1]
        )
        for flag in ("auto", "fp8")
    }
    # The model is float32, so a number takes a quarter; a block is 64 tokens.
    assert 0 <= tokens["fp8"] - 4 * tokens["auto"] < 4 * 64
    eager = dataclasses.replace(config, enforce_eager=True)
    memory = json.loads(launch.describe(eager))["memory"]
    assert memory[2].split()[2:4] == ["0.00", "GiB"]

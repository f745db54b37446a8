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
    ]
    # Of the smaller GPU, of which a tenth is left free.
    assert memory[-1].split() == ["left", "free", "4.00", "GiB"]
    eager = dataclasses.replace(config, enforce_eager=True)
    memory = json.loads(launch.describe(eager))["memory"]
    assert memory[2].split()[2:4] == ["0.00", "GiB"]

import json
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.lifecycle import ProcessConfig
from protocol.messages import EngineFacts
from worker.back_ends import build_runner
from worker.config import WorkerConfig

PROCESS = ProcessConfig(run_dir="unused")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 500,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 640,
}


def test_fake_workers_have_made_up_sizes_without_a_model() -> None:
    runner = build_runner(WorkerConfig(process=PROCESS, fake_workers=True, rank=1, tp=2))
    assert runner.facts == EngineFacts(
        rank=1,
        back_end="checksum",
        block_size=16,
        num_blocks=8192,
        slots=64,
        max_model_len=8192,
        vocab_size=32_000,
    )


def test_fake_workers_have_a_models_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = WorkerConfig(process=PROCESS, fake_workers=True, model=str(tmp_path))
    facts = build_runner(config).facts
    assert (facts.vocab_size, facts.max_model_len) == (500, 640)


def test_flags_win_over_a_models_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    facts = build_runner(
        WorkerConfig(
            process=PROCESS,
            fake_workers=True,
            model=str(tmp_path),
            max_model_len=64,
            block_size=4,
            num_blocks=20,
            max_num_seqs=3,
        )
    ).facts
    sizes = (facts.max_model_len, facts.block_size, facts.num_blocks, facts.slots)
    assert sizes == (64, 4, 20, 3)


def test_sizes_that_no_memory_holds_are_refused() -> None:
    config = WorkerConfig(
        process=PROCESS, fake_workers=True, num_blocks=2**31 - 2, block_size=65_536
    )
    with pytest.raises(ConfigError, match="lower --num-blocks"):
        build_runner(config)

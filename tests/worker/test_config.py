import pytest

from protocol.flags import parse_flags, to_flags
from protocol.lifecycle import ProcessConfig
from worker.config import WorkerConfig
from worker.faults import Faults

PROCESS = ProcessConfig(run_dir="unused")


def test_a_config_survives_its_command_line() -> None:
    config = WorkerConfig(
        process=ProcessConfig(run_dir="d", epoch=3),
        rank=1,
        tp=2,
        fake_workers=True,
        enforce_eager=True,
        gpu_memory_utilization=0.5,
        num_blocks=9,
        faults=Faults(max_delay_ms=1.5, hang_step=4),
    )
    assert parse_flags(WorkerConfig, to_flags(config), program="worker") == config


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"tp": 0}, "--tp 0 must be 1 to 1024"),
        ({"rank": 1}, "--rank 1 must be 0 to 0 with --tp 1"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization 0 must be above 0"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization nan must be above 0"),
        ({"block_size": 0}, "--block-size 0 must be 1 to 65536"),
        ({"threads": 0}, "--threads 0 must be 1 to 4096"),
        ({"device": "cuda"}, "--device cuda does not go with --fake-workers, .* use auto or cpu"),
        ({"attention": "fa3"}, "--attention fa3 does not go with --fake-workers"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 does not go with --fake-workers"),
        ({"max_model_len": 2**20 + 1}, "--max-model-len 1048577 must be 1 to 1048576"),
        ({"fake_workers": False, "model": ""}, "--model is required without --fake-workers"),
        (
            {"fake_workers": False, "model": "m", "faults": Faults(hang_step=1)},
            "--fault-… flags need --fake-workers",
        ),
    ],
)
def test_flags_out_of_range_are_named(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        WorkerConfig(**({"process": PROCESS, "fake_workers": True} | flags))

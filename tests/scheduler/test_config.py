import pytest

from protocol.flags import parse_flags, to_flags
from protocol.lifecycle import ProcessConfig
from scheduler.config import SchedulerConfig

PROCESS = ProcessConfig(run_dir="/run/x")


def test_a_config_survives_its_own_command_line():
    config = SchedulerConfig(
        process=PROCESS,
        tp=2,
        policy="latency",
        max_num_batched_tokens=64,
        itl_target_ms=12.5,
        max_in_flight=1,
        prefix_cache=False,
        step_timeout_s=1.5,
        max_waiting_requests=7,
        max_waiting_tokens=70,
    )
    flags = to_flags(config)
    assert "--no-prefix-cache" in flags
    assert flags[flags.index("--step-timeout") + 1] == "1.5"
    assert parse_flags(SchedulerConfig, flags, program="test") == config


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"tp": 0}, "--tp is 0; it must be 1 to 1024"),
        ({"max_in_flight": 3}, "--max-in-flight is 3; it must be 1 to 2"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens is 0"),
        ({"itl_target_ms": 0.0}, "--itl-target-ms is 0; it must be 0.1 to 60000"),
        ({"itl_target_ms": 20.0, "policy": "throughput"}, "--itl-target-ms needs --policy latency"),
        ({"step_timeout_s": float("nan")}, "--step-timeout is nan"),
        ({"max_waiting_requests": 0}, "--max-waiting-requests is 0"),
        ({"max_waiting_tokens": 0}, "--max-waiting-tokens is 0"),
    ],
)
def test_values_out_of_range_name_their_flag(setting, sentence):
    with pytest.raises(ValueError, match=sentence):
        SchedulerConfig(process=PROCESS, **setting)

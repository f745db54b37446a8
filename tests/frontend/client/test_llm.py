"""The arguments of LLM are the flags of launch.py. What it does is in tests/integration."""

import dataclasses
import inspect
import typing

import pytest

from frontend.client import llm
from frontend.client.llm import LLM, command_line
from launch import LaunchConfig
from protocol.errors import ConfigError
from protocol.flags import parse_flags

NOT_OFFERED = {
    "host",
    "port",
    "listen",
    "run_dir",
    "print_commands",
    "plan",
    "explain_kernels",
    "lifeline_fd",
    "allow_unauthenticated",  # an LLM serves this machine alone
}
OTHER_DEFAULTS = {"policy": "throughput", "log_level": "warning", "drain_timeout_s": 0.0}
OWN = {"self", "start_timeout_s"}

FIELDS = {
    field.name: field for field in dataclasses.fields(LaunchConfig) if field.name not in NOT_OFFERED
}
SIGNATURE = inspect.signature(LLM.__init__).parameters


class StartedError(Exception):
    """Stops LLM once its command line is known."""


@pytest.fixture
def launched(monkeypatch):
    """Return a function that gives the LaunchConfig that an LLM's arguments come to."""

    def launch(*arguments, **settings):
        def start(flags):
            raise StartedError(flags)

        monkeypatch.setattr(llm, "EngineProcess", start)
        with pytest.raises(StartedError) as caught:
            LLM(*arguments, **settings)
        (flags,) = caught.value.args
        return parse_flags(LaunchConfig, flags, program="launch.py")

    return launch


def test_each_flag_is_an_argument_of_the_same_name_and_default():
    assert set(SIGNATURE) - OWN == set(FIELDS)
    for name, field in FIELDS.items():
        expected = OTHER_DEFAULTS.get(name, field.default)
        assert SIGNATURE[name].default == expected, name


def test_each_flag_with_choices_has_them_as_its_type():
    hints = typing.get_type_hints(LLM.__init__)
    for name, field in FIELDS.items():
        if "choices" in field.metadata:
            assert set(typing.get_args(hints[name])) == set(field.metadata["choices"]), name


def test_the_defaults_are_the_launchers_but_for_a_free_port(launched):
    assert launched() == LaunchConfig(port=0, **OTHER_DEFAULTS)


def test_every_argument_reaches_the_launcher(launched):
    values = {
        "tp": 2,
        "device": "cpu",
        "dtype": "float32",
        "quantization": "none",
        "kv_cache_dtype": "fp8",
        "frontends": 3,
        "max_model_len": 512,
        "block_size": 4,
        "num_blocks": 100,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 64,
        "gpu_memory_utilization": 0.5,
        "load_format": "dummy",
        "attention": "torch",
        "enforce_eager": True,
        "policy": "latency",
        "itl_target_ms": 12.5,
        "max_waiting_requests": 9,
        "swap_space_gib": 0.5,
        "max_waiting_tokens": 90,
        "max_in_flight": 1,
        "prefix_cache": False,
        "threads": 1,
        "served_model_name": "name",
        "api_key_file": "/keys",
        "chat_template": "/template.jinja",
        "ignore_generation_config": True,
        "seed": -5,
        "drain_timeout_s": 1.5,
        "step_timeout_s": 9.0,
        "fake_workers": True,
        "record": "/record",
        "log_level": "debug",
    }
    assert set(values) | {"model"} == set(FIELDS)
    config = launched("some/model", **values)
    assert config == LaunchConfig(model="some/model", port=0, **values)


def test_paths_are_made_absolute(launched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = launched(record="tapes", api_key_file="keys", chat_template="t")
    assert (config.record, config.api_key_file) == (str(tmp_path / "tapes"), str(tmp_path / "keys"))
    assert config.chat_template == str(tmp_path / "t")


def test_a_wrong_value_is_the_launchers_to_refuse(launched):
    with pytest.raises(ConfigError, match="--tp is 0"):
        launched(tp=0)


def test_flags_become_arguments():
    flags = {"--a": True, "--b": False, "--c": None, "--d": 0, "--e": "-x", "--f": ""}
    assert command_line(flags) == ["--a", "--d=0", "--e=-x"]

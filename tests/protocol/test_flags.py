"""Dataclasses as command lines, both ways."""

import re
from dataclasses import dataclass, field

import pytest

from frontend.config import FrontendConfig
from frontend.text.config import TextConfig
from launch import LaunchConfig
from protocol.flags import parse_flags, to_flags
from protocol.lifecycle import ProcessConfig
from scheduler.config import SchedulerConfig
from worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    process: ProcessConfig
    size: int | None = field(default=None, metadata={"help": "a number"})
    share: float = field(default=0.5, metadata={"help": "a share", "flag": "--the-share"})
    cache: bool = field(default=True, metadata={"help": "no cache"})
    fake: bool = field(default=False, metadata={"help": "fake"})
    kind: str = field(default="a", metadata={"help": "a kind", "choices": ("a", "b")})

    def __post_init__(self) -> None:
        if self.size == 13:
            raise ValueError("--size 13 brings bad luck; take 12")


def parse(*argv: str) -> Config:
    return parse_flags(Config, argv, program="prog")


def test_defaults_are_left_out():
    config = parse("--run-dir", "/d")
    assert config == Config(process=ProcessConfig(run_dir="/d"))
    assert to_flags(config) == ["--run-dir", "/d"]


def test_every_flag_goes_there_and_back():
    argv = ["--run-dir", "/d", "--epoch", "4", "--log-level", "debug", "--size", "3"]
    argv += ["--the-share", "0.25", "--no-cache", "--fake", "--kind", "b"]
    config = parse(*argv)
    assert config == Config(
        process=ProcessConfig(run_dir="/d", epoch=4, log_level="debug"),
        size=3,
        share=0.25,
        cache=False,
        fake=True,
        kind="b",
    )
    assert parse(*to_flags(config)) == config


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "prog: the following arguments are required: --run-dir"),
        (["--run-dir", "d", "--size", "many"], "prog: argument --size: invalid int value: 'many'"),
        (["--run-dir", "d", "--siz", "3"], "prog: unrecognized arguments: --siz 3"),
        (["--run-dir", "d", "--run-dir", "e"], "prog: argument --run-dir: given twice"),
        (["--run-dir", "d", "--kind", "c"], "choose from 'a', 'b'"),
        (["--run-dir", "d", "--size", "13"], "prog: --size 13 brings bad luck; take 12"),
    ],
)
def test_a_wrong_line_exits_2_with_one_sentence(argv, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        parse(*argv)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert message.count("\n") == 1


def test_help_shows_a_default_where_it_says_something_and_never_twice(capsys):
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "--size INT a number --the-share FLOAT a share (default: 0.5)" in page
    assert "--record STR directory that gets a recording of every frame --log-level" in page
    assert "a kind (default: a)" in page


@pytest.mark.parametrize(
    "config_type", [LaunchConfig, FrontendConfig, SchedulerConfig, WorkerConfig, TextConfig]
)
def test_every_flags_help_says_its_default_once(config_type, capsys):
    with pytest.raises(SystemExit):
        parse_flags(config_type, ["--help"], program="prog")
    page = " ".join(capsys.readouterr().out.split())
    for flag in re.split(r" (?=--[a-z])", page.partition("options: ")[2]):
        assert flag.count("default:") <= 1, flag
        assert not re.search(r"default: (None|-1|\)|$)", flag), flag

import json

import pytest

from benchmarks import simulate


def refusal(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        simulate.parse_arguments(argv)
    assert ended.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2]


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("--replicas", "0", "'0' is not a whole number from 1 to 1000."),
        ("--replicas", "1001", "'1001' is not a whole number from 1 to 1000."),
        ("--requests", "0", "'0' is not a whole number of at least 1."),
        ("--max-num-seqs", "0", "'0' is not a whole number from 1 to 65536."),
        ("--prompt", "0", "'0' is not a whole number from 1 to 3072."),
        ("--output", "0", "'0' is not a whole number from 1 to 3072."),
        ("--rate", "nan", "'nan' is not a finite number above 0."),
        ("--groups", "-1", "'-1' is not a whole number of at least 0."),
        ("--prefix", "-1", "'-1' is not a whole number of at least 0."),
        ("--itl-target-ms", "60001", "'60001' is not a number from 0.1 to 60000."),
    ],
)
def test_a_number_out_of_its_limits_is_refused(flag, value, sentence, capsys):
    assert refusal([flag, value], capsys) == f"argument {flag}: {sentence}\n"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["--policy", "throughput", "--itl-target-ms", "5"],
            "--itl-target-ms needs --policy latency; the others have no target.",
        ),
        (
            ["--policy", "prefill-first", "--replicas", "2"],
            "--policy prefill-first has only one replica; leave it or --replicas out.",
        ),
        (["--prefix", "1042433"], "--prefix is 1042433; a replica holds at most 1042432."),
    ],
)
def test_flags_that_do_not_go_together_are_refused(argv, sentence, capsys):
    assert refusal(argv, capsys) == f"{sentence}\n"


def test_prefill_first_is_left_out_aloud_with_several_replicas(capsys):
    assert simulate.parse_arguments([]).policy == ["latency", "throughput", "prefill-first"]
    assert capsys.readouterr().err == ""
    assert simulate.parse_arguments(["--replicas", "2"]).policy == ["latency", "throughput"]
    assert capsys.readouterr().err == "prefill-first is left out: it has only one replica.\n"


def test_a_trace_that_no_replica_holds_ends_with_a_sentence(tmp_path, monkeypatch, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,750000,1\n")
    argv = ["simulate", "--card", "nvidia-h200-qwen3-8b", "--trace", str(path)]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as ended:
        simulate.main()
    assert ended.value.code == 2
    sentence = "line 2: prompt and output have 750001 tokens; at most 749952 can be run."
    assert capsys.readouterr() == ("", f"{path}, {sentence}\n")


def test_the_least_of_everything_is_simulated(monkeypatch, capsys):
    flags = ["--requests", "1", "--prompt", "1", "--output", "1", "--max-num-seqs", "1"]
    monkeypatch.setattr("sys.argv", ["simulate", *flags])
    simulate.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["policy"], line["requests"]) for line in lines] == [
        ("latency", 1),
        ("throughput", 1),
        ("prefill-first", 1),
    ]

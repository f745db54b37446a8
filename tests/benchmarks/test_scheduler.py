import pytest

from benchmarks.scheduler import measure, parse_arguments, percentile_99


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("--running", "0", "'0' is not a whole number from 1 to 16000."),
        ("--running", "16001", "'16001' is not a whole number from 1 to 16000."),
        ("--steps", "0", "'0' is not a whole number of at least 1."),
        ("--block-size", "0", "'0' is not a whole number from 1 to 65536."),
        ("--frontends", "0", "'0' is not a whole number of at least 1."),
        ("--max-in-flight", "3", "'3' is not a whole number from 1 to 2."),
    ],
)
def test_what_cannot_be_measured_is_refused(flag, value, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_arguments([flag, value])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {flag}: {sentence}\n")


def test_the_least_of_everything_is_measured():
    steps, _ = measure(running=1, block_size=1, steps=1, frontends=1, max_in_flight=1)
    assert len(steps) == 1
    assert percentile_99([7.0]) == 7.0

import pytest

from worker.product_shapes import ProductShape
from worker.tune import KNOWN, distinct_shapes, main

NO_GPU = pytest.mark.skipif("torch.cuda.is_available()", reason="there is a GPU")


def test_a_shape_is_measured_once():
    shapes = distinct_shapes([KNOWN["qwen3-0.6b"], KNOWN["qwen3-8b"]], 1)
    assert len(shapes) == 10
    twice = distinct_shapes([KNOWN["qwen3-0.6b"], KNOWN["qwen3-0.6b"]], 1)
    assert twice[0] == ProductShape("qkv, qkv", 4096, 1024)
    assert len(twice) == 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shapes", "gpt-5"], "invalid choice: 'gpt-5'"),
        (["--shapes", "qwen3-0.6b", "--rows", "x"], "invalid int value"),
    ],
)
def test_flags_that_are_wrong(capsys: pytest.CaptureFixture[str], flags: list[str], words: str):
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err

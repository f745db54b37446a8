from pathlib import Path

import pytest

from protocol.errors import ModelFileError
from worker.gguf_file import GgufHeader
from worker.gguf_metadata import GgufMetadata

KEYS = GgufMetadata(
    GgufHeader(
        path=Path("model.gguf"),
        file_bytes=100,
        metadata={"whole": 3, "half": 0.5, "flag": True, "name": "llama"},
        array_lengths={},
        tensors={},
    )
)


def test_values_and_defaults():
    assert (KEYS.integer("whole"), KEYS.integer("other", 4)) == (3, 4)
    assert (KEYS.number("half"), KEYS.number("whole"), KEYS.number("other", 1.0)) == (0.5, 3.0, 1.0)
    assert (KEYS.text("name"), KEYS.text("other", "none")) == ("llama", "none")
    assert (KEYS.token_id("whole"), KEYS.token_id("other")) == ((3,), ())
    assert KEYS.optional_integer("other") is None


@pytest.mark.parametrize("key", ["half", "flag", "name", "other"])
def test_what_is_no_integer(key: str):
    with pytest.raises(ModelFileError, match=rf"^model\.gguf: {key} is .*; it must be an integer"):
        KEYS.integer(key)


@pytest.mark.parametrize("key", ["flag", "name", "other"])
def test_what_is_no_number(key: str):
    with pytest.raises(ModelFileError, match=rf"^model\.gguf: {key} is .*; it must be a number"):
        KEYS.number(key)


def test_what_is_no_string():
    with pytest.raises(ModelFileError, match=r"^model\.gguf: whole is 3; it must be a string"):
        KEYS.text("whole")

import json
from pathlib import Path

import pytest

from protocol.errors import ModelFileError
from worker.fingerprint import fingerprint


def of_model(path: str | Path, arithmetic: str = "a", tp: int = 1, length: int = 100) -> str:
    return fingerprint(str(path), arithmetic=arithmetic, tp=tp, max_model_len=length)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"layers": 2}))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_it_is_the_same_for_the_same_model_and_settings(model: Path) -> None:
    assert of_model(model) == of_model(model)
    assert len(of_model("")) == 64


def test_whatever_changes_numbers_changes_it(model: Path) -> None:
    seen = {
        of_model(""),
        of_model(model),
        of_model(model, arithmetic="b"),
        of_model(model, tp=2),
        of_model(model, length=101),
    }
    (model / "model.safetensors").write_bytes(b"other weights")
    seen.add(of_model(model))
    (model / "config.json").write_text(json.dumps({"layers": 3}))
    seen.add(of_model(model))
    assert len(seen) == 7


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json"):
        of_model(tmp_path)

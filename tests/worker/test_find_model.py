from pathlib import Path

import pytest

from protocol.errors import ConfigError
from worker.find_model import BUNDLED_FILE, BUNDLED_NAME, bundled_model, find_model


def test_without_a_name_it_is_the_bundled_model():
    path, name = find_model("")
    assert path == bundled_model()
    assert (Path(path).name, name) == (BUNDLED_FILE, BUNDLED_NAME)


def test_a_directory_is_served_by_its_name_and_a_file_by_its_stem(tmp_path):
    file = tmp_path / "tiny.Q4.gguf"
    file.touch()
    assert find_model(str(tmp_path)) == (str(tmp_path), tmp_path.name)
    assert find_model(str(file)) == (str(file), "tiny.Q4")


@pytest.mark.parametrize("name", ["no/such/model", "./absent", "~nobody-at-all/x", "x" * 5000])
def test_what_is_not_there_is_refused_without_asking_the_hub(name):
    with pytest.raises(ConfigError, match="--model"):
        find_model(name)

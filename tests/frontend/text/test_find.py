import pytest

from frontend.text.cache import Conversion, TokenizerCache
from frontend.text.find import conversion_key, find_text_model
from frontend.text.text_model import TextModel
from protocol.errors import ConfigError


@pytest.fixture
def caches(tmp_path):
    return [TokenizerCache(tmp_path / name) for name in ("first", "second")]


def test_a_model_that_is_not_there_is_refused(tmp_path, caches):
    with pytest.raises(ConfigError, match=r"--model: there is no file or directory .*nothing"):
        find_text_model(tmp_path / "nothing", caches)


def test_a_directory_is_read_as_it_is(tmp_path, caches):
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert find_text_model(tmp_path, caches) == TextModel(eos_ids=[3])


def test_a_conversion_is_found_in_any_cache(tmp_path, caches):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    assert find_text_model(model, caches) is None
    caches[1].store(conversion_key(model), Conversion(b"", TextModel(eos_ids=[2])))
    assert find_text_model(model, caches) == TextModel(eos_ids=[2])
    model.write_bytes(b"changed")
    assert find_text_model(model, caches) is None


def test_an_operators_template_comes_before_the_models(tmp_path, caches):
    (tmp_path / "chat_template.jinja").write_text("model's")
    (tmp_path / "mine.jinja").write_text("mine")
    model = find_text_model(tmp_path, caches, str(tmp_path / "mine.jinja"))
    assert model.chat_templates == {"default": "mine"}

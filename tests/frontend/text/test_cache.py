import logging
import os
import stat

import pytest

from frontend.text.cache import Conversion, TokenizerCache, cache_key
from frontend.text.text_model import TextModel

MODEL = TextModel(
    chat_templates={"default": "{{ x }}"}, special_tokens={"eos_token": "</s>"}, eos_ids=[2]
)


@pytest.fixture
def cache(tmp_path):
    return TokenizerCache(tmp_path / "cache")


def test_what_is_stored_is_found(cache, tmp_path):
    assert cache.load("key") is None
    assert cache.store("key", Conversion(b'{"a": 1}', MODEL))
    file = tmp_path / "cache" / "key" / "tokenizer.json"
    found = cache.load("key")
    assert found == TextModel(
        tokenizer_file=str(file),
        chat_templates={"default": "{{ x }}"},
        special_tokens={"eos_token": "</s>"},
        eos_ids=[2],
    )
    assert file.read_bytes() == b'{"a": 1}'
    assert sorted(path.name for path in file.parent.iterdir()) == ["model.json", "tokenizer.json"]
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_model_without_a_tokenizer_is_remembered_too(cache):
    assert cache.store("key", Conversion(b"", TextModel(eos_ids=[1])))
    assert cache.load("key") == TextModel(eos_ids=[1])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b'{"a": 2}'),
        ("tokenizer.json", b""),
        ("model.json", b'{"tokenizer_sha256":'),
        ("model.json", b"{}"),
        ("model.json", b"\xff"),
    ],
)
def test_a_damaged_entry_is_ignored_with_one_warning(cache, tmp_path, caplog, name, content):
    cache.store("key", Conversion(b'{"a": 1}', MODEL))
    (tmp_path / "cache" / "key" / name).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert cache.load("key") is None
    assert len(caplog.records) == 1
    assert cache.store("key", Conversion(b'{"a": 1}', MODEL))
    assert cache.load("key") is not None


def test_an_entry_without_its_tokenizer_is_no_entry(cache, tmp_path):
    cache.store("key", Conversion(b'{"a": 1}', MODEL))
    (tmp_path / "cache" / "key" / "tokenizer.json").unlink()
    assert cache.load("key") is None


def test_a_cache_that_cannot_be_written_costs_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("no directory")
    cache = TokenizerCache(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING):
        assert not cache.store("key", Conversion(b"{}", MODEL))
    assert len(caplog.records) == 1


def test_the_key_follows_path_size_and_time(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    os.utime(file, ns=(1, 1))
    key = cache_key([file])
    assert cache_key([file]) == key
    assert len(key) == 32
    os.utime(file, ns=(1, 2))
    later = cache_key([file])
    file.write_bytes(b"longer")
    os.utime(file, ns=(1, 1))
    longer = cache_key([file])
    other = tmp_path / "other.gguf"
    other.write_bytes(b"one")
    os.utime(other, ns=(1, 1))
    assert len({key, later, longer, cache_key([other])}) == 4

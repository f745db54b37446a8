import json

import pytest

from frontend.text.text_model import (
    TextModel,
    files_of_conversion,
    needs_conversion,
    read_directory,
    read_template,
    with_template_file,
)
from protocol.errors import ModelFileError


def write(directory, **files):
    for name, content in files.items():
        name = name.replace("__", ".")
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name).write_text(text)


def test_a_directory_without_tokenizer_files_serves_token_ids(tmp_path):
    write(tmp_path, config__json={"eos_token_id": 7, "hidden_size": 64})
    assert read_directory(tmp_path) == TextModel(eos_ids=[7])
    assert not needs_conversion(tmp_path)


def test_everything_a_directory_says(tmp_path):
    write(
        tmp_path,
        tokenizer__json="{}",
        tokenizer_config__json={
            "bos_token": None,
            "eos_token": {"content": "<|im_end|>", "lstrip": False},
            "pad_token": "<|endoftext|>",
            "unknown": {"nested": [1]},
            "add_bos_token": True,
            "chat_template": "{{ messages }}",
        },
        generation_config__json={"eos_token_id": [5, 6]},
        config__json={"eos_token_id": 5, "text_config": {"eos_token_id": 9}},
    )
    assert read_directory(tmp_path) == TextModel(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        chat_templates={"default": "{{ messages }}"},
        special_tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        eos_ids=[5, 6, 9],
        add_bos=True,
    )
    assert not needs_conversion(tmp_path)


def test_a_template_file_comes_before_the_config(tmp_path):
    write(tmp_path, tokenizer_config__json={"chat_template": "old"}, chat_template__jinja="new")
    assert read_directory(tmp_path).chat_template == "new"


def test_several_templates_have_names(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(tmp_path, tokenizer_config__json={"chat_template": named})
    model = read_directory(tmp_path)
    assert model.chat_template == "d"
    assert model.chat_templates == {"tool_use": "t", "default": "d"}
    write(tmp_path, tokenizer_config__json={"chat_template": named[:1]})
    assert read_directory(tmp_path).chat_template is None


def test_where_templates_are(tmp_path):
    write(
        tmp_path,
        tokenizer_config__json={"chat_template": "config"},
        chat_template__json={"chat_template": "processor"},
    )
    assert read_directory(tmp_path).chat_templates == {"default": "processor"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    write(tmp_path, chat_template__jinja="file")
    assert read_directory(tmp_path).chat_templates == {"default": "file", "rag": "r"}
    write(tmp_path, mine="mine")
    mine = with_template_file(read_directory(tmp_path), tmp_path / "mine")
    assert mine.chat_templates == {"default": "mine"}
    assert mine.chat_template_file == str(tmp_path / "mine")


def test_a_template_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ModelFileError, match=r"nothing cannot be read: .* No such file"):
        read_template(tmp_path / "nothing")
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(ModelFileError, match="latin cannot be read: 'utf-8' codec"):
        read_template(tmp_path / "latin")
    with open(tmp_path / "large", "wb") as file:
        file.truncate((4 << 20) + 1)
    with pytest.raises(ModelFileError, match="large has 4194305 bytes"):
        read_template(tmp_path / "large")


def test_special_tokens_may_be_in_an_older_file(tmp_path):
    write(
        tmp_path,
        special_tokens_map__json={"bos_token": "<old>", "eos_token": {"content": "</s>"}},
        tokenizer_config__json={"bos_token": "<s>", "eos_token": None},
    )
    model = read_directory(tmp_path)
    assert model.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_how_to_sample_is_read(tmp_path):
    write(tmp_path, generation_config__json={"top_k": 20, "eos_token_id": 3})
    model = read_directory(tmp_path)
    assert (model.generation.given, model.eos_ids) == (["top_k"], [3])


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"eos_token_id": "five"}', '{"eos_token_id": 1.5}']
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path, content):
    write(tmp_path, config__json=content)
    with pytest.raises(ModelFileError, match=r"config\.json cannot be read"):
        read_directory(tmp_path)


@pytest.mark.parametrize("bos", [5, ["<s>"], {"content": 5}, {}, True])
def test_a_special_token_that_is_no_text_is_refused(tmp_path, bos):
    write(tmp_path, tokenizer_config__json={"bos_token": bos})
    with pytest.raises(
        ModelFileError, match=r"tokenizer_config\.json: bos_token must be a token's"
    ):
        read_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_older_tokenizer_files_need_a_conversion(tmp_path, name):
    (tmp_path / name).write_text("x")
    (tmp_path / "merges.txt").write_text("x")
    assert needs_conversion(tmp_path)
    assert set(files_of_conversion(tmp_path)) == {tmp_path / name, tmp_path / "merges.txt"}
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not needs_conversion(tmp_path)


def test_a_file_needs_a_conversion(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    assert needs_conversion(model)
    assert files_of_conversion(model) == [model]

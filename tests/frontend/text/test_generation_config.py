import json

import pytest

from frontend.text.generation_config import GenerationConfig, read_generation_config
from protocol.errors import ModelFileError
from protocol.messages import SamplingDefaults


def read(directory, content):
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "generation_config.json").write_text(text)
    return read_generation_config(directory)


def test_a_model_without_the_file_says_nothing(tmp_path):
    assert read_generation_config(tmp_path) == GenerationConfig()


def test_sampling_parameters_become_defaults(tmp_path):
    config = read(
        tmp_path,
        {
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": 0.05,
            "max_new_tokens": 2048,
            "eos_token_id": [1, 2],
            "transformers_version": "4.51.0",
            "repetition_penalty": 1.05,
            "encoder_repetition_penalty": 1.0,
        },
    )
    assert config.defaults == SamplingDefaults(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.05, max_tokens=2048
    )
    assert config.given == [
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
    ]
    assert config.not_honoured == []


@pytest.mark.parametrize(
    ("content", "temperature"),
    [
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": False}, 0.0),
        ({"do_sample": None, "temperature": 0.7}, 0.7),
        ({"temperature": None, "top_k": None, "do_sample": True}, 1.0),
        ({}, 1.0),
    ],
)
def test_no_sampling_is_temperature_0_and_null_is_absent(tmp_path, content, temperature):
    config = read(tmp_path, content)
    assert config.defaults == SamplingDefaults(temperature=temperature)


def test_what_cannot_be_honoured_is_named(tmp_path):
    config = read(
        tmp_path,
        {
            "repetition_penalty": 2.05,
            "no_repeat_ngram_size": 3,
            "num_beams": 1,
            "suppress_tokens": [],
            "temperature": 2.5,
            "top_p": 0,
            "top_k": 5,
        },
    )
    assert config.not_honoured == [
        *("temperature=2.5", "top_p=0", "repetition_penalty=2.05", "no_repeat_ngram_size=3")
    ]
    assert config.defaults == SamplingDefaults(top_k=5)


@pytest.mark.parametrize("content", ["{", "[]", {"temperature": "0.6"}, {"top_k": 1.5}])
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path, content):
    with pytest.raises(ModelFileError, match=r"generation_config\.json cannot be read"):
        read(tmp_path, content)

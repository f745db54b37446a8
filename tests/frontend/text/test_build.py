import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[3]


def convert(model):
    """Convert in a process of its own; return (tokenizer.json, text facts) or the error's text."""
    code = (
        "import sys, json; from pathlib import Path; import msgspec; "
        "from frontend.text.build import convert; from protocol.errors import ModelFileError\n"
        "try: c = convert(Path(sys.argv[1]))\n"
        "except ModelFileError as e: print(json.dumps(str(e)))\n"
        "else: print(json.dumps([c.tokenizer_json.decode(), msgspec.to_builtins(c.model)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_bundled_models_facts_come_from_its_metadata(smol):
    assert smol.eos_ids == [2]
    assert smol.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert smol.add_bos is False
    assert "add_generation_prompt" in smol.chat_template


def test_the_bundled_models_tokenizer(smol_tokenizer):
    assert smol_tokenizer.get_vocab_size() == 49152
    assert smol_tokenizer.encode("<|im_start|>hello world").tokens == [
        "<|im_start|>",
        "hello",
        "Ġworld",
    ]


@pytest.mark.slow
def test_a_directory_with_older_files(tmp_path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello hello world"] * 5, trainer)
    tokenizer.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}'
    )
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "eos_token_id": 0}')
    tokenizer_json, facts = convert(tmp_path)
    converted = Tokenizer.from_str(tokenizer_json)
    assert converted.decode(converted.encode("hello wörld").ids) == "hello wörld"
    assert facts["eos_ids"] == [0]
    assert facts["special_tokens"] == {"eos_token": "<|endoftext|>"}


@pytest.mark.slow
def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00 and then nothing")
    assert "is not a readable GGUF file" in convert(tmp_path / "model.gguf")


@pytest.mark.slow
def test_a_special_id_that_is_no_id_is_named(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_token_list(["a", "b"])
    writer.add_string("tokenizer.ggml.padding_token_id", "b")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert convert(tmp_path / "model.gguf") == (
        f"{tmp_path}/model.gguf: tokenizer.ggml.padding_token_id is not what it has to be: "
        "Expected `int`, got `str`."
    )

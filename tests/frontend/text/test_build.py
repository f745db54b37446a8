import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[3]


def convert(*models):
    """Convert in a process of its own; return (tokenizer.json, text facts) or the error's text.

    Of several models a list of these.
    """
    code = (
        "import sys, json; from pathlib import Path; import msgspec; "
        "from frontend.text.build import convert; from protocol.errors import ModelFileError\n"
        "for model in sys.argv[1:]:\n"
        "    try: c = convert(Path(model))\n"
        "    except ModelFileError as e: print(json.dumps(str(e)))\n"
        "    else: print(json.dumps([c.tokenizer_json.decode(), msgspec.to_builtins(c.model)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, models)],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()[-len(models) :]]
    return answers if len(answers) > 1 else answers[0]


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


def save_tokenizer(path, family, kind, tokens, **metadata):
    """Write a GGUF file of a tokenizer; `tokens` are (text, type), the type 1 for plain ones."""
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_block_count(1)
    writer.add_tokenizer_model(kind)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([type_ for _, type_ in tokens])
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        else:
            value_type = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(f"tokenizer.ggml.{key}", value, value_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.slow
def test_the_kinds_of_qwen2_and_gemma3(tmp_path):
    """Byte-level pieces with merges and Qwen's split; sentence pieces with scores and bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    qwen = save_tokenizer(
        tmp_path / "qwen2.gguf",
        "qwen2",
        "gpt2",
        [(text, 1) for text in (*alphabet, "he", "12")] + [("<|im_end|>", 3), ("<think>", 4)],
        pre="qwen2",
        merges=["h e", "1 2"],
        eos_token_id=258,
        add_bos_token=False,
    )
    pieces = ["▁", "h", "i", "▁h", "▁hi", "hi"]
    gemma = save_tokenizer(
        tmp_path / "gemma3.gguf",
        "gemma3",
        "llama",
        [("<pad>", 3), ("<eos>", 3), ("<bos>", 3), ("<unk>", 2), ("<end_of_turn>", 3), ("  ", 4)]
        + [(f"<0x{byte:02X}>", 6) for byte in range(256)]
        + [(piece, 1) for piece in pieces],
        pre="default",
        scores=[0.0] * 262 + [-float(index) for index in range(len(pieces))],
        bos_token_id=2,
        eos_token_id=1,
        unknown_token_id=3,
        padding_token_id=0,
        add_bos_token=True,
    )
    (qwen_json, qwen_facts), (gemma_json, gemma_facts) = convert(qwen, gemma)

    tokenizer = Tokenizer.from_str(qwen_json)
    encoded = tokenizer.encode("hey 12<think><|im_end|>", add_special_tokens=False)
    assert encoded.tokens == ["he", "y", "Ġ", "1", "2", "<think>", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == "hey 12<think>"
    # No <|endoftext|>, which the class that reads such files would add.
    assert tokenizer.get_vocab_size() == 260
    assert (qwen_facts["eos_ids"], bool(qwen_facts["add_bos"])) == ([258], False)

    tokenizer = Tokenizer.from_str(gemma_json)
    encoded = tokenizer.encode("hi hi  é<end_of_turn>", add_special_tokens=False)
    assert encoded.tokens == ["hi", "▁hi", "▁▁", "<0xC3>", "<0xA9>", "<end_of_turn>"]
    assert tokenizer.decode(encoded.ids) == "hi hi  é"
    assert tokenizer.get_vocab_size() == 268
    assert (gemma_facts["eos_ids"], gemma_facts["add_bos"]) == ([1], True)
    assert list(gemma_facts["special_tokens"].values()) == ["<bos>", "<eos>", "<unk>", "<pad>"]

"""Bad input gets one clear sentence, and nothing dies."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def tiny_weights():
    shapes = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (32, 32),
            f"{prefix}.self_attn.k_proj.weight": (16, 32),
            f"{prefix}.self_attn.v_proj.weight": (16, 32),
            f"{prefix}.self_attn.o_proj.weight": (32, 32),
            f"{prefix}.mlp.gate_proj.weight": (64, 32),
            f"{prefix}.mlp.up_proj.weight": (64, 32),
            f"{prefix}.mlp.down_proj.weight": (32, 64),
            f"{prefix}.input_layernorm.weight": (32,),
            f"{prefix}.post_attention_layernorm.weight": (32,),
        }
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY))
    save_file(tiny_weights(), path / "model.safetensors")
    return path


@pytest.fixture
def broken(tiny_model, tmp_path):
    """A copy of the tiny model, to break."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path)
    return path


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--tp", "two"], "argument --tp: invalid int value: 'two'"),
        (["--chat-template", "/no/file"], "/no/file cannot be read: [Errno 2] No such file"),
        (["--tp", "0"], "--tp is 0; it must be at least 1."),
        (["--tp", "2", "--device", "cpu"], "legal are 1, 3."),
        (["--threads", "10000"], "--threads 10000 must be 1 to 4096."),
        (["--port", "70000"], "--port is 70000; it must be 0 to 65535."),
        (["--max-in-flight", "3"], "--max-in-flight is 3; it must be 1 or 2."),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--gpu-memory-utilization", "nan"], "it must be above 0 and at most 1."),
        (["--model", "no/such/model"], "--model no/such/model does not exist"),
        (["--max-model-len", "100000"], "the model was made for at most 8192 tokens"),
        (["--fake-workers", "--max-model-len", "5000000"], "at most 8192 tokens"),
        (["--fake-workers", "--device", "cuda"], "--device cuda does not go with --fake-workers"),
        (["--fake-workers", "--attention", "fa3"], "--attention fa3 does not go with"),
        (["--host", ""], "lets other machines in without a key"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid cannot be resolved"),
        (["--api-key-file", "no-such-file"], "no-such-file cannot be read: No such file"),
        (["--listen", "127.0.0.1:5555"], "--listen is 127.0.0.1:5555; it must be tcp://HOST:PORT"),
        (
            ["--listen", "tcp://127.0.0.1:0", "--frontends", "2"],
            "port 0 is for one frontend alone",
        ),
        (["--seed", str(2**63)], "--seed is 9223372036854775808; it must fit 64 bits"),
        (
            ["--api-key-file", "keys", "--listen", "tcp://127.0.0.1:0"],
            "--listen and --api-key-file exclude each other: keys guard HTTP alone",
        ),
        (["--served-model-name", "x" * 257], "of 257 characters; give 1 to 256 characters"),
        (["--served-model-name", "a\udcff"], r"--served-model-name is 'a\udcff', of 2 characters"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_flag_exits_2_with_one_sentence(cli, argv, sentence):
    code, out, err = cli("--port", "0", *argv) if "--port" not in argv else cli(*argv)
    assert code == 2, err
    assert out == ""
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_cuda_without_a_gpu_exits_2(cli):
    code, _, err = cli("--device", "cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    assert code == 2
    assert "--device cuda needs a GPU and its driver" in err


def end_of(engine):
    code, log = engine.wait(60)
    return code, log.splitlines()[-1]


def test_a_missing_model_file_is_named(launch, broken):
    (broken / "model.safetensors").unlink()
    code, last = end_of(launch("--model", str(broken), wait=False))
    assert code == 2
    assert last.startswith("launch.py: ")
    assert "safetensors" in last


def test_a_model_without_config_is_refused(cli, tmp_path):
    code, _, err = cli("--model", str(tmp_path))
    assert code == 2
    assert "config.json" in err


def test_an_unsupported_architecture_is_named_with_the_supported_ones(cli, broken):
    (broken / "config.json").write_text(json.dumps(TINY | {"architectures": ["MambaForCausalLM"]}))
    code, _, err = cli("--model", str(broken))
    assert code == 2
    assert "MambaForCausalLM" in err
    assert "LlamaForCausalLM" in err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--fake-workers", "--record", "/dev/null/tape"], "--record /dev/null/tape cannot be"),
        (["--fake-workers", "--num-blocks", "1", "--block-size", "1"], "hold 1 token; a sequence"),
        (["--num-blocks", "100000000"], "GiB are free: lower --num-blocks, or leave it out."),
    ],
    ids=lambda flags: " ".join(flags) if isinstance(flags, list) else "",
)
def test_what_only_a_process_can_see_ends_the_start_with_its_sentence(launch, flags, sentence):
    code, last = end_of(launch(*flags, wait=False))
    assert code == 2
    assert last.startswith("launch.py: ")
    assert sentence in last


def test_another_models_tokenizer_is_refused(launch, broken):
    from tokenizers import Tokenizer, decoders, models

    words = {f"word{number}": number for number in range(65)}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(broken / "tokenizer.json"))
    code, last = end_of(launch("--fake-workers", "--model", str(broken), wait=False))
    assert code == 2
    assert last == (
        f"launch.py: The tokenizer of {broken} has token ids up to 64, and the model's are 0 to "
        "63: they do not belong together."
    )


@pytest.mark.parametrize("cut", ["in the header", "in the data"])
def test_a_truncated_weights_file_is_refused(launch, broken, cut):
    file = broken / "model.safetensors"
    content = file.read_bytes()
    header = struct.unpack("<Q", content[:8])[0]
    file.write_bytes(content[: header // 2 if cut == "in the header" else len(content) - 64])
    code, last = end_of(launch("--model", str(broken), wait=False))
    assert code == 2
    assert "model.safetensors" in last


def test_a_corrupt_weights_file_is_refused(launch, broken):
    (broken / "model.safetensors").write_bytes(b"\xff" * 4096)
    code, last = end_of(launch("--model", str(broken), wait=False))
    assert code == 2
    assert "model.safetensors" in last


def test_a_missing_tensor_is_named(launch, broken):
    weights = tiny_weights()
    del weights["model.norm.weight"]
    save_file(weights, broken / "model.safetensors")
    code, last = end_of(launch("--model", str(broken), wait=False))
    assert code == 2
    assert "model.norm.weight" in last


def test_a_number_that_is_none_is_found(launch, broken):
    weights = tiny_weights()
    weights["model.layers.1.mlp.up_proj.weight"][40, 7] = np.nan
    save_file(weights, broken / "model.safetensors")
    code, last = end_of(launch("--model", str(broken), wait=False))
    assert code == 2
    assert last.startswith(
        f"launch.py: {broken}/model.safetensors: the tensor model.layers.1.mlp.up_proj.weight has "
        "values that are NaN or infinite"
    )


def test_sizes_that_no_memory_holds_are_refused_at_once(launch, broken):
    absurd = {"vocab_size": 1 << 22, "hidden_size": 1 << 17, "head_dim": 8}
    (broken / "config.json").write_text(json.dumps(TINY | absurd))
    code, last = end_of(launch("--model", str(broken), wait=False))
    assert code == 2
    assert "config.json: hidden_size 131072" in last
    assert "vocab_size 4194304 make weights of" in last


@pytest.mark.parametrize("size", [0, 100, 1_000_000])
def test_a_truncated_gguf_is_refused(launch, tmp_path, size):
    from worker.find_model import bundled_model

    path = tmp_path / "cut.gguf"
    with Path(bundled_model()).open("rb") as file:
        path.write_bytes(file.read(size))
    code, last = end_of(launch("--model", str(path), wait=False))
    assert code == 2
    assert "cut.gguf" in last


def test_a_model_without_tokenizer_serves_token_ids_only(launch, tiny_model):
    engine = launch("--model", str(tiny_model))
    answer = engine.complete(prompt=[1, 2, 3], max_tokens=2, temperature=0)
    assert answer["usage"]["prompt_tokens"] == 3
    status, _, error = engine.request("POST", "/v1/completions", {"prompt": "Hello"})
    assert status == 400
    assert "tokenizer" in error["error"]["message"]


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [""]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, 400, "prompt"),
        (CHAT, {"messages": []}, 400, "messages"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "-1"),
        (COMPLETIONS, {"prompt": [49152]}, 400, "49152; ids are 0 to 49151"),
        (COMPLETIONS, {"prompt": [2**40]}, 400, ""),
        (COMPLETIONS, {"prompt": [5] * 9000}, 400, "9000 tokens"),
        (COMPLETIONS, {"prompt": "a " * 40_000}, 400, "at most 8191"),
        (COMPLETIONS, {"prompt": [5], "model": "gpt-17"}, 404, "gpt-17"),
        (COMPLETIONS, {"prompt": [5], "max_tokens": 0}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": [5], "max_tokens": "5"}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": [5], "max_tokens": 9000}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": [5], "temperature": -1}, 400, "temperature"),
        (COMPLETIONS, {"prompt": [5], "top_p": 0}, 400, "top_p"),
        (COMPLETIONS, {"prompt": [5], "n": 0}, 400, "n"),
        (COMPLETIONS, {"prompt": [5], "stop": ["a"] * 5}, 400, "stop"),
        (COMPLETIONS, {"prompt": [5], "logit_bias": {"x": 1}}, 400, "logit_bias"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, 400, "tools"),
        (
            CHAT,
            {"messages": USER, "response_format": {"type": "json_object"}},
            400,
            "response_format",
        ),
        (CHAT, {}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_an_error_object(fake_engine, path, body, status, text, stream):
    got, headers, answer = fake_engine.request("POST", path, {**body, "stream": stream})
    assert got == status, answer
    assert headers.get_content_type() == "application/json"
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert text in answer["error"]["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": [5]} x',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": [5], "temperature": NaN}',
        b'{"prompt": [5], "temperature": 1e400}',
        b"[" * 100_000,
        b'{"prompt": [5], "user": ' + b"[" * 100_000,
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda raw: repr(raw[:30]),
)
def test_malformed_json_is_a_400(fake_engine, raw):
    status, _, answer = fake_engine.request("POST", COMPLETIONS, raw=raw)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


def test_unknown_paths_and_methods_are_error_objects(fake_engine):
    status, _, answer = fake_engine.request("GET", "/v1/nonsense")
    assert (status, "error" in answer) == (404, True)
    status, _, answer = fake_engine.request("GET", CHAT)
    assert (status, "error" in answer) == (405, True)


def test_the_engine_is_well_after_all_of_it(fake_engine):
    assert fake_engine.request("GET", "/health")[0] == 200
    assert fake_engine.complete(prompt=[1], max_tokens=3)["usage"]["completion_tokens"] <= 3

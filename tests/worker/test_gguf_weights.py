from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from protocol.errors import ModelFileError
from tests.worker.gguf_models import interleaved, save_gguf
from tests.worker.tiny_models import Stepper, reference_logits, save_llama
from worker.gguf_file import GgufHeader, GgufTensor, read_gguf_header
from worker.gguf_weights import gguf_name, halves_from_pairs, load_gguf
from worker.weights import Weight

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79]


def test_names():
    assert gguf_name("lm_head.weight") == "output.weight"
    assert gguf_name("model.layers.12.mlp.up_proj.weight") == "blk.12.ffn_up.weight"
    assert gguf_name("model.layers.0.self_attn.k_proj.bias") == "blk.0.attn_k.bias"


@pytest.mark.parametrize("columns", [(), (3,)])
def test_halves_from_pairs(columns: tuple[int, ...]):
    rows = torch.randn(24, *columns)
    pairs = torch.from_numpy(interleaved(rows.numpy(), heads=3).copy())
    assert not torch.equal(pairs, rows)
    assert torch.equal(halves_from_pairs(pairs, head_dim=8), rows)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_logits(tmp_path: Path, tied: bool, kind: str):
    quantization = gguf.GGMLQuantizationType[kind]
    # Whole blocks of 32 in every row.
    reference = save_llama(
        tmp_path,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        tie_word_embeddings=tied,
    )
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim == 2:
                stored = gguf.quantize(parameter.numpy(), quantization)
                parameter.copy_(torch.from_numpy(gguf.dequantize(stored, quantization)))
    path = save_gguf(tmp_path / "model.gguf", reference, quantization)
    logits = Stepper(path).prefill(0, TOKENS, range(3))
    torch.testing.assert_close(logits, reference_logits(reference, TOKENS)[-1], rtol=0, atol=1e-4)


@pytest.fixture
def header(tmp_path: Path) -> GgufHeader:
    reference = save_llama(tmp_path, num_hidden_layers=1)
    return read_gguf_header(save_gguf(tmp_path / "model.gguf", reference))


def wanted(header: GgufHeader) -> list[Weight]:
    return [
        Weight(name="model.embed_tokens.weight", target=torch.empty(131, 48)),
        Weight(name="model.norm.weight", target=torch.empty(48)),
    ]


def fails(header: GgufHeader, weights: list[Weight], *words: str) -> None:
    with pytest.raises(ModelFileError) as error:
        load_gguf(header, weights, head_dim=8, ignored=frozenset(), threads=2)
    for word in ["model.gguf", *words]:
        assert word in str(error.value)


def changed(header: GgufHeader, name: str, tensor: GgufTensor) -> GgufHeader:
    kept = {key: header.tensors[key] for key in ("token_embd.weight", "output_norm.weight")}
    return replace(header, tensors=kept | {name: tensor})


def test_missing_tensor(header: GgufHeader):
    weights = [
        *wanted(header),
        Weight(name="model.layers.7.mlp.up_proj.weight", target=torch.empty(1)),
    ]
    fails(header, weights, "blk.7.ffn_up.weight is missing")


def test_a_tensor_too_many(header: GgufHeader):
    extra = changed(header, "blk.0.strange.weight", header.tensors["output_norm.weight"])
    fails(extra, wanted(header), "blk.0.strange.weight is not part of this model")


def test_wrong_shape(header: GgufHeader):
    tensor = replace(header.tensors["output_norm.weight"], shape=(47,))
    fails(changed(header, "output_norm.weight", tensor), wanted(header), "[47]", "[48]")


def test_unknown_storage(header: GgufHeader):
    tensor = replace(header.tensors["output_norm.weight"], type_id=999)
    fails(changed(header, "output_norm.weight", tensor), wanted(header), "storage type 999")


def test_rows_that_are_not_whole_blocks(header: GgufHeader):
    kind = int(gguf.GGMLQuantizationType.Q8_0)
    tensor = replace(header.tensors["output_norm.weight"], type_id=kind)
    fails(changed(header, "output_norm.weight", tensor), wanted(header), "whole blocks of 32")


def test_truncated_data(header: GgufHeader):
    tensor = replace(header.tensors["output_norm.weight"], offset=header.file_bytes - 8)
    fails(changed(header, "output_norm.weight", tensor), wanted(header), "ends inside output_norm")


def test_a_file_that_shrinks_after_its_header_was_read(header: GgufHeader):
    header.path.write_bytes(
        header.path.read_bytes()[: header.tensors["token_embd.weight"].offset + 9]
    )
    only = {key: header.tensors[key] for key in ("token_embd.weight", "output_norm.weight")}
    fails(replace(header, tensors=only), wanted(header), "truncated")

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from protocol.errors import ModelFileError
from tests.worker.gguf_models import interleaved, quantise, save_gguf, stored
from tests.worker.models.families import FAMILIES, Family
from tests.worker.models.harness import save_family
from tests.worker.thread_ranks import ThreadRank, thread_ranks
from tests.worker.tiny_models import CPU, Stepper, reference_logits, save_llama
from worker.gguf_file import GgufHeader, GgufTensor, read_gguf_header
from worker.gguf_weights import READABLE, halves_from_pairs, load_gguf
from worker.model_config import ModelConfig
from worker.model_files import read_model_config
from worker.models import ARCHITECTURES
from worker.safetensors_weights import load_safetensors
from worker.weights import Weight

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79]


@pytest.mark.parametrize("columns", [(), (3,)])
def test_halves_from_pairs(columns: tuple[int, ...]):
    rows = torch.randn(24, *columns)
    pairs = torch.from_numpy(interleaved(rows.numpy(), heads=3).copy())
    assert not torch.equal(pairs, rows)
    assert torch.equal(halves_from_pairs(pairs, head_dim=8), rows)


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_every_part_of_every_kind(tmp_path: Path, kind: Kind):
    """Rows, columns and all of a matrix, to the number what the package makes of its blocks."""
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    data = stored(torch.randn(24, 2 * block).numpy(), kind)
    expected = torch.from_numpy(gguf.dequantize(data, kind)).view(24, 2 * block)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * 32 + data.tobytes())
    tensor = GgufTensor((24, 2 * block), int(kind), 32)
    tensors = {"token_embd.weight": tensor}
    header = GgufHeader(path, path.stat().st_size, {"general.architecture": "qwen2"}, {}, tensors)
    for dim, start, size in [(0, 0, 24), (0, 5, 9), (1, block // 2, block), (0, 3, 0)]:
        part = expected.narrow(dim, start, size)
        weight = Weight(
            name="model.embed_tokens.weight",
            target=torch.empty(part.shape),
            whole_size=expected.shape[dim],
            dim=dim,
            start=start,
        )
        num_bytes = load_gguf(header, [weight], head_dim=8, ignored=frozenset(), threads=2)
        assert torch.equal(weight.target, part)
        assert num_bytes <= data.nbytes
        assert size == 24 or dim == 1 or num_bytes == data.nbytes * size // 24


@pytest.mark.parametrize(
    "kind", [Kind.F16, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name
)
def test_logits(tmp_path: Path, kind: Kind):
    # Whole blocks of 256 in every row.
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
    reference = save_llama(tmp_path, **sizes, num_hidden_layers=1, tie_word_embeddings=True)
    data = quantise(reference, kind)
    path = save_gguf(tmp_path / "model.gguf", reference, kind, data)
    logits = Stepper(path).prefill(0, TOKENS, range(3))
    expected = reference_logits(reference, TOKENS)[-1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


FAMILY_ROWS = [family for family in FAMILIES if family.gguf]


@pytest.mark.parametrize("family", FAMILY_ROWS, ids=lambda family: family.gguf)
def test_families(tmp_path: Path, family: Family):
    """Config and every weight are those of the same model's directory; transformers agrees."""
    changes: dict[str, Any] = {"use_sliding_window": False} if family.gguf == "qwen2" else {}
    metadata: dict[str, Any] = {}
    if family.gguf == "gemma3":
        # No file can say otherwise; how many layers make a round, it can.
        changes = {"query_pre_attn_scalar": 12, "tie_word_embeddings": True}
        metadata = {"attention__sliding_window_pattern": [True, True, False, True]}
    reference = save_family(family, tmp_path, **changes)
    path = save_gguf(tmp_path / "model.gguf", reference, **metadata)
    theirs, ours = read_model_config(tmp_path), read_model_config(path)
    dtype = replace(ours, source=theirs.source, dtype=theirs.dtype)
    assert dtype == replace(theirs, rms_norm_eps=ours.rms_norm_eps)
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    for rank in thread_ranks(2):
        weights = [
            weights_of(source, config, rank)
            for source, config in ((tmp_path, theirs), (path, ours))
        ]
        assert weights[0].keys() == weights[1].keys()
        for name, weight in weights[0].items():
            torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=3e-7)


@pytest.mark.parametrize("family", FAMILY_ROWS, ids=lambda family: family.gguf)
def test_transformers_reads_the_same_files(tmp_path: Path, family: Family):
    """That the files of these tests are what others write: transformers finds its model in them."""
    changes: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": None}
    if family.gguf == "qwen3":
        changes["head_dim"] = 128  # it passes over `attention.key_length` of this family
    reference = save_family(family, tmp_path, **changes)
    save_gguf(tmp_path / "model.gguf", reference)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").state_dict()
    assert read.keys() == reference.state_dict().keys()
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(read[name], weight, rtol=0, atol=3e-7)


def weights_of(path: Path, config: ModelConfig, rank: ThreadRank) -> dict[str, torch.Tensor]:
    """Return a rank's loaded weights by name, several of one tensor one after the other."""
    model = ARCHITECTURES[config.architecture](
        config, group=rank, max_model_len=16, dtype=torch.float32, device=CPU
    )
    weights = list(model.weights())
    ignored = model.ignored_weights()
    if path.suffix == ".gguf":
        header = read_gguf_header(path)
        load_gguf(header, weights, head_dim=config.head_dim, ignored=ignored, threads=2)
    else:
        load_safetensors(path, weights, ignored=ignored, threads=2)
    return {weight.name: weight.target for weight in weights}


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


def test_a_known_kind_that_is_not_read(header: GgufHeader):
    kind = int(gguf.GGMLQuantizationType.IQ1_S)
    tensor = replace(header.tensors["output_norm.weight"], type_id=kind)
    changed_header = changed(header, "output_norm.weight", tensor)
    fails(changed_header, wanted(header), "output_norm.weight is stored as IQ1_S", "Q4_K")


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
def test_nan_and_infinity(tmp_path: Path, kind: Kind):
    reference = save_llama(tmp_path, num_hidden_layers=1, hidden_size=96, intermediate_size=64)
    data = quantise(reference, kind)
    row = data["model.embed_tokens.weight"][7]
    row[:2] = row.dtype.type(255) if kind == Kind.Q8_0 else float("nan")
    path = save_gguf(tmp_path / "model.gguf", reference, kind, data)
    with pytest.raises(ModelFileError, match=r"token_embd\.weight has values that are NaN"):
        Stepper(path)


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

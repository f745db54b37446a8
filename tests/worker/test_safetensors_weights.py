import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from protocol.errors import ModelFileError
from worker.safetensors_weights import load_safetensors
from worker.weights import Weight

TENSORS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.arange(5.0).to(torch.bfloat16),
    "c": torch.tensor([[7.0], [8.0]], dtype=torch.float16),
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def wanted() -> list[Weight]:
    return [
        Weight(name=name, target=torch.full(tensor.shape, -1.0)) for name, tensor in TENSORS.items()
    ]


def load(directory: Path, *, ignored: frozenset[str] = frozenset()) -> None:
    weights = wanted()
    load_safetensors(directory, weights, ignored=ignored, threads=2)
    for weight in weights:
        assert torch.equal(weight.target, TENSORS[weight.name].float())


def fails(directory: Path, *words: str) -> None:
    with pytest.raises(ModelFileError) as error:
        load(directory)
    for word in words:
        assert word in str(error.value)


def write_single(directory: Path, **changes: Any) -> Path:
    tensors = {name: tensor for name, tensor in (TENSORS | changes).items() if tensor is not None}
    save_file(tensors, directory / SINGLE)
    return directory / SINGLE


def write_shards(directory: Path, weight_map: dict[str, Any] | None = None) -> None:
    save_file({"a": TENSORS["a"]}, directory / "one.safetensors")
    save_file({name: TENSORS[name] for name in "bc"}, directory / "two.safetensors")
    default = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    index = {"weight_map": default if weight_map is None else weight_map}
    (directory / INDEX).write_text(json.dumps(index))


def test_single_file(tmp_path: Path):
    write_single(tmp_path)
    load(tmp_path)


def test_shards(tmp_path: Path):
    write_shards(tmp_path)
    load(tmp_path)


def test_only_the_shard_of_a_rank(tmp_path: Path):
    write_single(tmp_path)
    weights = wanted()
    weights[0] = Weight(name="a", target=torch.empty(3, 2), whole_size=4, dim=1, start=2)
    load_safetensors(tmp_path, weights, ignored=frozenset(), threads=2)
    assert torch.equal(weights[0].target, TENSORS["a"][:, 2:])


def test_ignored_tensors(tmp_path: Path):
    write_single(
        tmp_path, **{"lm_head.weight": torch.zeros(1), "x.rotary_emb.inv_freq": torch.zeros(1)}
    )
    load(tmp_path, ignored=frozenset({"lm_head.weight"}))
    fails(tmp_path, SINGLE, "lm_head.weight", "not part of this model")


def test_missing_tensor(tmp_path: Path):
    write_single(tmp_path, b=None)
    fails(tmp_path, str(tmp_path), "tensor b")


def test_wrong_shape(tmp_path: Path):
    write_single(tmp_path, a=torch.zeros(4, 3))
    fails(tmp_path, SINGLE, "tensor a", "[4, 3]", "[3, 4]")


def test_wrong_dtype(tmp_path: Path):
    write_single(tmp_path, b=torch.zeros(5, dtype=torch.int8))
    fails(tmp_path, SINGLE, "tensor b", "I8", "BF16")


def test_nan_and_infinity(tmp_path: Path):
    for value in (float("nan"), float("-inf")):
        write_single(tmp_path, c=torch.tensor([[7.0], [value]], dtype=torch.float16))
        fails(tmp_path, SINGLE, "tensor c", "NaN or infinite")


def test_a_truncated_file(tmp_path: Path):
    path = write_single(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    fails(tmp_path, SINGLE, "truncated")


def test_several_weights_of_one_tensor(tmp_path: Path):
    write_single(tmp_path)
    target = torch.empty(2, 4)
    weights = [
        Weight(name="a", target=target[:1], whole_size=3, start=2),
        Weight(name="a", target=target[1:], whole_size=3, start=0),
        *wanted()[1:],
    ]
    load_safetensors(tmp_path, weights, ignored=frozenset(), threads=2)
    assert torch.equal(target, TENSORS["a"][[2, 0]])


def test_what_could_run_code_is_not_read_but_can_be_converted(tmp_path: Path):
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    (tmp_path / "pytorch_model-00002-of-00002.bin").touch()
    fails(tmp_path, "as pytorch_model-00001-of-00002.bin", "convert it", "save_pretrained")


def test_no_weights(tmp_path: Path):
    fails(tmp_path, str(tmp_path), SINGLE, INDEX)


@pytest.mark.parametrize(
    "name", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", "", 5]
)
def test_index_may_not_lead_elsewhere(tmp_path: Path, name: object):
    write_shards(tmp_path, {"a": name, "b": "two.safetensors", "c": "two.safetensors"})
    fails(tmp_path, INDEX, "a is said to be in", "same directory")


def test_index_and_files_disagree(tmp_path: Path):
    write_shards(tmp_path, {"a": "two.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    fails(tmp_path, "two.safetensors", "the index says it holds a")


def test_missing_shard(tmp_path: Path):
    write_shards(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    fails(tmp_path, "two.safetensors", "missing")


def test_a_tensor_in_two_shards(tmp_path: Path):
    write_shards(tmp_path)
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, tmp_path / "one.safetensors")
    fails(tmp_path, "tensor b is also in")


@pytest.mark.parametrize("weight_map", [{}, [], "x"])
def test_index_without_a_map(tmp_path: Path, weight_map: Any):
    write_shards(tmp_path, weight_map)
    fails(tmp_path, INDEX, "weight_map")


def test_a_directory_in_place_of_a_file(tmp_path: Path):
    (tmp_path / SINGLE).mkdir()
    fails(tmp_path, SINGLE, "regular file")

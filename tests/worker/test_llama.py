"""The model against transformers: logits within 1e-4, whatever the mix of rows."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.plan_builder import make_join
from tests.worker.tiny_models import SIZES, Stepper, reference_logits, save_llama
from worker.families import SUPPORTED_ARCHITECTURES
from worker.models import ARCHITECTURES

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(SIZES["vocab_size"]), k=length)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("tiny")
    return path, save_llama(path)


def test_supported_names():
    assert tuple(ARCHITECTURES) == SUPPORTED_ARCHITECTURES


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1},
        {"head_dim": 16},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
        {"rope_parameters": YARN},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}},
    ],
    ids=str,
)
def test_variants(tmp_path: Path, changes: dict[str, Any]):
    reference = save_llama(tmp_path, **changes)
    stepper = Stepper(tmp_path)
    tokens = text(45)
    expected = reference_logits(reference, tokens)
    assert_close(stepper.prefill(0, tokens[:41], range(12)), expected[40])
    for index in range(41, 45):
        assert_close(stepper.decode({0: tokens[index]})[0], expected[index])


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [7, 9, 24], [16, 24], [39, 1], [2, 4, 4, 30]])
def test_chunked_prefill(tiny, sizes: list[int]):
    path, reference = tiny
    tokens = text(40)
    stepper = Stepper(path)
    joins = [make_join(3, tokens, range(20, 31))]
    start = 0
    for size in sizes:
        end = start + size
        logits = stepper.step(joins=joins, chunks=[(3, start, size, int(end == 40))])
        joins, start = [], end
    assert_close(logits[0], reference_logits(reference, tokens)[39])
    assert_close(stepper.decode({3: 5})[0], reference_logits(reference, [*tokens, 5])[40])


def test_long_chunks_go_in_tiles(tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("worker.attention.torch_tiles._TILE_ROWS", 8)
    path, reference = tiny
    tokens = text(60)
    stepper = Stepper(path)
    stepper.step(joins=[make_join(0, tokens, range(16))], chunks=[(0, 0, 5, 0)])
    logits = stepper.step(chunks=[(0, 5, 55, 1)])
    assert_close(logits[0], reference_logits(reference, tokens)[59])


def test_mixed_steps(tiny):
    path, reference = tiny
    texts = [text(length, seed) for seed, length in enumerate((30, 9, 17, 50))]
    expected = [reference_logits(reference, tokens) for tokens in texts]
    stepper = Stepper(path)
    stepper.prefill(0, texts[0][:20], range(8))
    stepper.prefill(1, texts[1][:5], range(8, 11))
    stepper.last_tokens[:2] = torch.tensor([texts[0][20], texts[1][5]])
    logits = stepper.step(
        joins=[
            make_join(2, texts[2], range(11, 17), generation=9),
            make_join(3, texts[3], range(20, 33), generation=9),
        ],
        decode=[1, 0],
        chunks=[(2, 0, 17, 1), (3, 0, 21, 0)],
    )
    assert_close(logits, torch.stack([expected[1][5], expected[0][20], expected[2][16]]))
    stepper.last_tokens[:3] = torch.tensor([texts[0][21], texts[1][6], 4])
    logits = stepper.step(decode=[0, 1], chunks=[(3, 21, 29, 1)])
    assert_close(logits, torch.stack([expected[0][21], expected[1][6], expected[3][49]]))


def test_rows_of_very_different_lengths(tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("worker.attention.torch_attention._WORTH_SPLITTING", 8)
    path, reference = tiny
    lengths = [3, 70, 8, 33, 1]
    texts = [text(length + 1, seed) for seed, length in enumerate(lengths)]
    stepper = Stepper(path)
    first = 0
    for slot, tokens in enumerate(texts):
        stepper.prefill(slot, tokens[:-1], range(first, first + len(tokens) // 4 + 1))
        first += len(tokens) // 4 + 1
    logits = stepper.decode({slot: tokens[-1] for slot, tokens in enumerate(texts)})
    for row, tokens in zip(logits, texts, strict=True):
        assert_close(row, reference_logits(reference, tokens)[-1])


def test_scattered_blocks_shared_and_copied(tiny):
    path, reference = tiny
    tokens = text(22)
    stepper = Stepper(path)
    stepper.prefill(0, tokens, [9, 2, 30, 5, 17, 11])
    # A second sequence has the first 16 tokens in common and takes their blocks as they are.
    other = [*tokens[:16], *text(5, seed=1)]
    join = make_join(1, other, [9, 2, 30, 5, 40, 41], generation=5)
    logits = stepper.step(joins=[join], chunks=[(1, 16, 5, 1)])
    assert_close(logits[0], reference_logits(reference, other)[20])
    # A third has two of its blocks copied.
    third = [*tokens[:8], *text(3, seed=2)]
    join = make_join(2, third, [50, 51, 52], generation=6)
    logits = stepper.step(joins=[join], copies=[(9, 50), (2, 51)], chunks=[(2, 8, 3, 1)])
    assert_close(logits[0], reference_logits(reference, third)[10])
    assert_close(stepper.decode({0: 7})[0], reference_logits(reference, [*tokens, 7])[22])


def test_what_another_has_left_in_a_copied_block_is_not_read(tiny):
    path, reference = tiny
    tokens = text(6)
    stepper = Stepper(path)
    stepper.prefill(0, tokens, [9, 2])
    # As the other's next steps leave it when they fail.
    stepper.cache.data[:, :, :, 2, 2:] = float("nan")
    join = make_join(1, tokens, [9, 40], generation=5)
    logits = stepper.step(joins=[join], copies=[(2, 40)], chunks=[(1, 5, 1, 1)])
    assert_close(logits[0], reference_logits(reference, tokens)[5])
    assert_close(stepper.decode({1: 7})[0], reference_logits(reference, [*tokens, 7])[6])


def test_bfloat16(tiny):
    path, reference = tiny
    tokens = text(30)
    stepper = Stepper(path, dtype=torch.bfloat16)
    ours = stepper.prefill(0, tokens[:29], range(8)).float()
    theirs = reference_logits(reference, tokens)
    error = (ours - theirs[28]).abs().max() / theirs.std()
    assert error < 0.2
    error = (stepper.decode({0: tokens[29]})[0].float() - theirs[29]).abs().max() / theirs.std()
    assert error < 0.2

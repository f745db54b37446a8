"""Every family against transformers: logits, and tokens through the scheduler's core."""

from functools import partial

import pytest
import torch

from protocol.messages import SamplingParams
from tests.worker.core_engine import CoreEngine
from tests.worker.models.families import FAMILIES, NUM_TOKENS, TP_SIZES, Family
from tests.worker.models.harness import assert_equal_to_transformers, save_family
from tests.worker.thread_ranks import thread_ranks
from tests.worker.tiny_models import CPU, reference_logits
from worker.families import SUPPORTED_ARCHITECTURES
from worker.memory_plan import weight_count
from worker.model_files import read_model_config
from worker.models import ARCHITECTURES
from worker.parallel import OneRank
from worker.weights import fill_with_dummies

BESIDE = ("model.vision_tower.", "model.multi_modal_projector.")
PROMPT = [(7 * i + i * i) % 131 for i in range(40)]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.model_type)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    family: Family = request.param
    path = tmp_path_factory.mktemp(family.model_type)
    return family, path, save_family(family, path)


def test_every_architecture_has_a_row():
    assert {family.architecture for family in FAMILIES} == set(ARCHITECTURES)
    assert set(SUPPORTED_ARCHITECTURES) == set(ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.parametrize("size", TP_SIZES)
def test_logits(saved, size: int):
    _, path, reference = saved
    assert_equal_to_transformers(path, reference, size)


@pytest.mark.slow
def test_greedy_tokens(saved):
    """Prompts in chunks of at most 16 tokens, and a second one that begins as the first does."""
    _, path, reference = saved
    engine = CoreEngine(
        path, block_size=4, tp=1, max_model_len=128, max_tokens=16, prefix_key=b"key"
    )
    prompts = (PROMPT, [*PROMPT[:30], *PROMPT[:7]])
    for number, (prompt, count) in enumerate(zip(prompts, (8, NUM_TOKENS), strict=True)):
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=count, ignore_eos=True)
        (tokens,) = engine.generate(prompt, [(number, 0, params)])
        assert len(tokens) == count
        assert len(set(tokens)) > count // 4, "a text that repeats itself shows little"
        logits = reference_logits(reference, [*prompt, *tokens])
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert engine.scheduler.counters.cached_tokens == 28


def test_what_is_estimated_is_what_is_held(saved):
    _, path, reference = saved
    text = (p for name, p in reference.named_parameters() if not name.startswith(BESIDE))
    assert weight_count(read_model_config(path), tp=1) == sum(p.numel() for p in text)


def test_dummy_weights_do_not_depend_on_the_number_of_ranks(saved):
    _, path, _ = saved
    config = read_model_config(path)
    build = partial(
        ARCHITECTURES[config.architecture], config, max_model_len=8, dtype=torch.float32, device=CPU
    )
    whole, *parts = (list(build(group=group).weights()) for group in (OneRank(), *thread_ranks(4)))
    for weights in (whole, *parts):
        fill_with_dummies(weights, seed=3)
    for weights in parts:
        for weight, of_all in zip(weights, whole, strict=True):
            assert (weight.name, weight.shape) == (of_all.name, of_all.shape)
            # A fused tensor has a weight for each of its parts, each from a row of its own on.
            start = weight.start - of_all.start
            part = of_all.target.narrow(weight.dim, start, weight.end - weight.start)
            assert torch.equal(weight.target, part), weight.name

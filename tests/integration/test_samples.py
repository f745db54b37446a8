"""Samples of one prompt through the real core and a real, tiny model at --tp 2, in process.

What they produce must be what requests of their own produce that share nothing.
"""

import pytest

from protocol.messages import SamplingParams
from scheduler import prefix_finder
from tests.worker.core_engine import CoreEngine
from tests.worker.tiny_models import save_llama

PROMPT = [(7 * i + i * i) % 131 for i in range(22)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("tiny")
    save_llama(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("prefix_key", [None, b"key"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["torch", "paged"])
def test_samples_are_those_of_requests_of_their_own(
    tiny, monkeypatch, block_size, prefix_key, is_paged
):
    greedy = SamplingParams(temperature=0.0, seed=0, max_tokens=12)
    drawn = [SamplingParams(temperature=1.0, seed=seed, max_tokens=12) for seed in (5, 6, 7)]
    alone = CoreEngine(tiny, block_size=block_size, is_paged=is_paged)
    one, *separate = alone.generate(
        PROMPT, [(number, 0, params) for number, params in enumerate([greedy, *drawn])]
    )
    assert alone.num_copies == 0
    assert len({tuple(tokens) for tokens in separate}) == 3

    monkeypatch.setattr(prefix_finder, "WORTH_WAITING_TOKENS", 8)
    shared = CoreEngine(tiny, block_size=block_size, is_paged=is_paged, prefix_key=prefix_key)
    assert shared.generate(PROMPT, [(0, sample, greedy) for sample in range(3)]) == [one] * 3
    assert shared.generate(PROMPT, [(1, *each) for each in enumerate(drawn)]) == separate
    assert shared.num_copies >= 2
    if prefix_key is None:
        assert shared.scheduler.counters.cached_tokens == 2 * 2 * 21

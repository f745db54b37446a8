import math
from pathlib import Path

import pytest
import torch

from benchmarks.perplexity import CHUNK, TEXT, Scores, chunks_of, our_scores, transformers_scores
from tests.worker.tiny_models import CPU, save_llama


def test_chunks():
    chunks = chunks_of(range(2 * CHUNK + 1))
    # The last token predicts none.
    assert [len(chunk) for chunk in chunks] == [CHUNK, CHUNK]
    assert chunks[1][0] == CHUNK


def test_perplexity_of_a_coin():
    assert Scores(torch.tensor([0.5, 0.5]).log(), 1.0).perplexity == pytest.approx(2.0)


def test_the_text_is_the_one_that_was_measured():
    assert len(TEXT.read_bytes()) == 84_306


def test_tiny_model_as_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.perplexity.CHUNK", 64)
    monkeypatch.setattr("benchmarks.perplexity._LOGIT_ROWS", 20)
    save_llama(tmp_path, hidden_size=48, intermediate_size=96)
    tokens = torch.randint(131, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    theirs = transformers_scores(tmp_path, tokens, CPU)
    assert len(theirs.logprobs) == 150 - 3
    ours = our_scores(tmp_path, tokens, torch.float32, CPU, "none")
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)
    assert ours.perplexity == pytest.approx(theirs.perplexity, rel=1e-3)
    fp8 = our_scores(tmp_path, tokens, torch.float32, CPU, "fp8")
    assert 0 < abs(math.log(fp8.perplexity / theirs.perplexity)) < 0.5
    cached = our_scores(tmp_path, tokens, torch.float32, CPU, "none", cache_flag="fp8")
    assert 0 < abs(math.log(cached.perplexity / theirs.perplexity)) < 0.5

import pytest
import torch

from benchmarks.gpu_check import check_draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("has_filters", [False, True])
@pytest.mark.parametrize("vocab_size", [151_936, 49_152, 1003])
def test_same_tokens_as_torchs_sampler(vocab_size: int, has_filters: bool):
    pytest.importorskip("triton")
    outcome = check_draw(torch.device("cuda"), vocab_size, has_filters=has_filters)
    assert outcome.is_right, outcome.detail

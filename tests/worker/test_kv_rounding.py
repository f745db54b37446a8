import pytest
import torch

from protocol.messages import SamplingParams
from tests.worker.core_engine import CoreEngine
from tests.worker.tiny_models import save_llama
from worker.kv_rounding import E4M3, kv_cache_dtype, round_to_e4m3

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_nearest_and_at_most_448(dtype: torch.dtype):
    x = [0.0, 1.0, 1.0625, 1.1875, -17.0, 447.0, 460.0, 470.0, -5000.0, 2**-10, 2**-9]
    rounded = round_to_e4m3(torch.tensor(x, dtype=dtype))
    assert rounded.dtype == E4M3
    # A tie goes to the even one of its neighbours, an eighth apart from 1 on.
    expected = [0.0, 1.0, 1.0, 1.25, -16.0, 448.0, 448.0, 448.0, -448.0, 0.0, 2**-9]
    assert rounded.float().tolist() == expected


def test_what_is_not_finite_shows():
    x = torch.tensor([NAN, INFINITY, -INFINITY, 3e38])
    assert round_to_e4m3(x).float().isnan().tolist() == [True, True, True, False]
    assert x.isnan().tolist() == [True, False, False, False], "x stays as it is"


def test_what_the_flag_means():
    assert kv_cache_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert kv_cache_dtype("fp8", torch.float32) == torch.float8_e4m3fn


@pytest.mark.slow
@pytest.mark.parametrize("is_paged", [False, True])
def test_tokens_depend_on_neither_chunks_nor_hits(is_paged: bool, tmp_path):
    """A prompt at once, in chunks of 7, and after a sequence with whose blocks it begins."""
    save_llama(tmp_path, max_position_embeddings=128)
    prompt = [(7 * i + i * i) % 131 for i in range(60)]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=40, ignore_eos=True)

    def engine(max_tokens: int, *, is_fp8: bool = True) -> CoreEngine:
        return CoreEngine(
            tmp_path,
            block_size=4,
            tp=1,
            max_model_len=128,
            max_tokens=max_tokens,
            is_paged=is_paged,
            prefix_key=b"key",
            is_fp8=is_fp8,
        )

    at_once = engine(100)
    assert at_once.ranks[0]._cache.data.dtype == E4M3
    (expected,) = at_once.generate(prompt, [(0, 0, params)])
    assert len(set(expected)) > 10, "a text that repeats itself shows little"
    (unrounded,) = engine(100, is_fp8=False).generate(prompt, [(0, 0, params)])
    assert unrounded != expected, "rounding that changes nothing shows nothing"

    assert engine(7).generate(prompt, [(0, 0, params)]) == [expected]

    # The first one's blocks, output included, are found again; the rest is computed at once.
    assert at_once.generate(prompt, [(1, 0, params)]) == [expected]
    assert at_once.scheduler.counters.cached_tokens == 56
    assert at_once.generate([*prompt, *expected[:20]], [(2, 0, params)])[0][:20] == expected[20:]
    assert at_once.scheduler.counters.cached_tokens == 56 + 76

    # A sequence that is preempted computes all it had anew: as one that brings it as its prompt.
    (again,) = engine(100).generate([*prompt, *expected[:20]], [(0, 0, params)])
    assert again[:20] == expected[20:]

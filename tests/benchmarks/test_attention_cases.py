import pytest
import torch

from benchmarks.attention_cases import Shape, largest_errors, random_case

SHAPE = Shape(num_heads=6, num_kv_heads=2, head_dim=8, block_size=16)


def test_lengths_meet_block_boundaries():
    case = random_case(SHAPE, num_decode=40, num_chunks=40, max_len=100, seed=0)
    assert {length % 16 for length in case.ends} >= {0, 1, 15}
    assert max(case.ends) <= 100
    assert {start == 0 for start, _ in case.chunks} == {True, False}
    assert min(count for _, count in case.chunks) >= 1


def test_what_computes_in_fp8_may_be_further_off(monkeypatch: pytest.MonkeyPatch):
    case = random_case(SHAPE, num_decode=5, num_chunks=4, max_len=100, seed=0, has_sinks=True)
    plain = []
    for names in ((), ("torch",)):
        monkeypatch.setattr("benchmarks.attention_cases.COMPUTE_IN_FP8", names)
        errors = largest_errors(
            case, "torch", dtype=torch.bfloat16, device=torch.device("cpu"), is_fp8=True
        )
        assert errors.is_within, errors
        plain.append(errors.plain)
    # e4m3 has 4 bits less of each number than bfloat16.
    assert 4 * plain[0] < plain[1] < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_torchs_back_end(dtype: torch.dtype, seed: int):
    case = random_case(SHAPE, num_decode=5, num_chunks=4, max_len=100, seed=seed)
    errors = largest_errors(case, "torch", dtype=dtype, device=torch.device("cpu"))
    assert errors.is_within, errors

import pytest
import torch

from benchmarks.attention_cases import Shape, largest_errors, random_case
from tests.worker.kernels.closeness import DTYPES

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = Shape(num_heads=6, num_kv_heads=2, head_dim=16, block_size=16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("num_decode", "num_chunks"), [(3, 3), (0, 1)])
def test_decode_rows_and_chunks(num_decode: int, num_chunks: int, dtype: torch.dtype):
    case = random_case(SHAPE, num_decode=num_decode, num_chunks=num_chunks, max_len=90, seed=1)
    errors = largest_errors(case, "triton", dtype=dtype, device=DEVICE)
    assert errors.is_within, errors


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_decode", "num_chunks", "as_graph"), [(3, 3, False), (3, 0, True)])
def test_a_cache_in_fp8(num_decode: int, num_chunks: int, as_graph: bool, dtype: torch.dtype):
    case = random_case(SHAPE, num_decode=num_decode, num_chunks=num_chunks, max_len=90, seed=4)
    errors = largest_errors(
        case, "triton", dtype=dtype, device=DEVICE, as_graph=as_graph, is_fp8=True
    )
    assert errors.is_within, errors


@pytest.mark.slow
@pytest.mark.parametrize(("num_decode", "num_chunks", "as_graph"), [(2, 2, False), (3, 0, True)])
def test_layers_of_different_windows_and_sinks(num_decode: int, num_chunks: int, as_graph: bool):
    case = random_case(
        SHAPE,
        num_decode=num_decode,
        num_chunks=num_chunks,
        max_len=60,
        seed=3,
        windows=(None, 16, 5),
        scale=0.4,
        has_sinks=True,
    )
    errors = largest_errors(case, "triton", dtype=torch.float32, device=DEVICE, as_graph=as_graph)
    assert errors.is_within, errors


@pytest.mark.parametrize(("num_decode", "num_chunks"), [(5, 0), (3, 2)])
def test_rows_of_a_graph(num_decode: int, num_chunks: int):
    case = random_case(SHAPE, num_decode=num_decode, num_chunks=num_chunks, max_len=90, seed=2)
    errors = largest_errors(case, "triton", dtype=torch.float16, device=DEVICE, as_graph=True)
    assert errors.is_within, errors

"""What surrounds a library's kernels; the kernels here are plain ones, and no block is cleared."""

import pytest
import torch

from benchmarks.attention_cases import Shape, largest_errors, random_case
from tests.worker.plain_kernels import PlainKernels

CPU = torch.device("cpu")
SHAPE = Shape(num_heads=6, num_kv_heads=2, head_dim=8, block_size=16)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("worker.attention.choice._kernels", lambda *_: PlainKernels())


@pytest.mark.parametrize(
    ("num_decode", "num_chunks"), [(5, 4), (0, 1), (0, 5), (4, 1), (3, 0), (1, 0)]
)
def test_decode_rows_and_chunks(num_decode: int, num_chunks: int):
    case = random_case(
        SHAPE, num_decode=num_decode, num_chunks=num_chunks, max_len=90, seed=num_decode
    )
    errors = largest_errors(case, "fa3", dtype=torch.float32, device=CPU)
    assert errors.is_within, errors


@pytest.mark.parametrize(
    ("num_decode", "num_chunks", "as_graph"), [(5, 4, False), (0, 1, False), (3, 0, True)]
)
def test_a_cache_in_fp8_is_read_by_fresh_chunks_too(
    num_decode: int, num_chunks: int, as_graph: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("benchmarks.attention_cases.COMPUTE_IN_FP8", ())  # these kernels do not
    case = random_case(
        SHAPE, num_decode=num_decode, num_chunks=num_chunks, max_len=90, seed=num_decode
    )
    errors = largest_errors(
        case, "fa3", dtype=torch.float32, device=CPU, as_graph=as_graph, is_fp8=True
    )
    assert errors.is_within, errors


@pytest.mark.parametrize("as_graph", [False, True])
@pytest.mark.parametrize(("num_decode", "num_chunks"), [(4, 0), (2, 2), (0, 1)])
def test_layers_of_different_windows_and_sinks(num_decode: int, num_chunks: int, as_graph: bool):
    case = random_case(
        SHAPE,
        num_decode=num_decode,
        num_chunks=num_chunks,
        max_len=90,
        seed=3,
        windows=(None, 5, 5, 16),
        scale=0.4,
        has_sinks=True,
    )
    errors = largest_errors(case, "fa3", dtype=torch.float32, device=CPU, as_graph=as_graph)
    assert errors.is_within, errors


@pytest.mark.parametrize(("num_decode", "num_chunks"), [(1, 0), (6, 0), (6, 3), (0, 1)])
def test_rows_of_a_graph(num_decode: int, num_chunks: int):
    case = random_case(SHAPE, num_decode=num_decode, num_chunks=num_chunks, max_len=90, seed=7)
    errors = largest_errors(case, "fa3", dtype=torch.float32, device=CPU, as_graph=True)
    assert errors.is_within, errors

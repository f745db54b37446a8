import pytest
import torch

from benchmarks.attention_cases import Shape, largest_errors, random_case
from worker.attention.choice import AttentionChoice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BLOCK_SIZE = AttentionChoice(name="flash-attn", reason="").block_size(None)


@pytest.mark.parametrize("as_graph", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(16, 8, 128), (9, 3, 64)])
def test_decode_rows_and_chunks(heads: tuple[int, int, int], dtype: torch.dtype, as_graph: bool):
    pytest.importorskip("flash_attn")
    shape = Shape.of(heads, BLOCK_SIZE)
    case = random_case(shape, num_decode=9, num_chunks=4, max_len=1500, seed=0)
    errors = largest_errors(
        case, "flash-attn", dtype=dtype, device=torch.device("cuda"), as_graph=as_graph
    )
    assert errors.is_within, errors


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("as_graph", [False, True])
@pytest.mark.parametrize(("num_decode", "num_chunks"), [(300, 0), (5, 3)])
@pytest.mark.parametrize("heads", [(64, 8, 64), (8, 4, 128)])
def test_windows_sinks_and_scale(
    heads: tuple[int, int, int], num_decode: int, num_chunks: int, as_graph: bool, has_sinks: bool
):
    """Of rows so many that they are the library's own to decode, and of some with chunks."""
    pytest.importorskip("flash_attn")
    case = random_case(
        Shape.of(heads, BLOCK_SIZE),
        num_decode=num_decode,
        num_chunks=num_chunks,
        max_len=1500,
        seed=1,
        windows=(None, 1, 100, BLOCK_SIZE, 128, 4000),
        scale=0.8 * heads[2] ** -0.5,
        has_sinks=has_sinks,
    )
    errors = largest_errors(
        case, "flash-attn", dtype=torch.bfloat16, device=torch.device("cuda"), as_graph=as_graph
    )
    assert errors.is_within, errors

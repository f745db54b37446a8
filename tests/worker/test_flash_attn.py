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
    num_heads, num_kv_heads, head_dim = heads
    shape = Shape(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=BLOCK_SIZE
    )
    case = random_case(shape, num_decode=9, num_chunks=4, max_len=1500, seed=0)
    errors = largest_errors(
        case, "flash-attn", dtype=dtype, device=torch.device("cuda"), as_graph=as_graph
    )
    assert errors.is_within, errors

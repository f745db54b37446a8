"""The vectors of sequences' last tokens on a GPU: a decode step's first kernel.

Reads and writes `hidden` numbers a row, and the row's slot and token before: the two look-ups and
the copy are one launch in place of three. A program takes a run of one row; a row of 1,024 is one.
"""

import triton
import triton.language as tl
from torch import Tensor

_RUN = 1024


def embed_last_tokens(slots: Tensor, last_tokens: Tensor, table: Tensor) -> Tensor:
    """Return the vectors of the last tokens of some slots. -> [rows, hidden]

    slots [rows] int32 or int64, last_tokens [all slots] integers, table [vocab, hidden].
    """
    assert table.is_contiguous(), "rows lie side by side"
    num_rows, size = len(slots), table.shape[1]
    vectors = table.new_empty(num_rows, size)
    num_runs = triton.cdiv(size, _RUN)
    _copy_runs[(num_rows * num_runs,)](
        slots,
        last_tokens,
        table,
        vectors,
        num_runs,
        SIZE=size,
        RUN=min(_RUN, triton.next_power_of_2(size)),
        num_warps=4,
    )
    return vectors


@triton.jit
def _copy_runs(slots, last_tokens, table, vectors, num_runs, SIZE: tl.constexpr, RUN: tl.constexpr):
    """Copy one run of one row's vector."""
    row = (tl.program_id(0) // num_runs).to(tl.int64)
    columns = tl.program_id(0) % num_runs * RUN + tl.arange(0, RUN)
    held = columns < SIZE
    token = tl.load(last_tokens + tl.load(slots + row)).to(tl.int64)
    vector = tl.load(table + token * SIZE + columns, mask=held)
    tl.store(vectors + row * SIZE + columns, vector, mask=held)

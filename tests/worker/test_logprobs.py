import numpy as np
import torch

from protocol.columns import unpack_float32, unpack_int32
from worker.logprobs import Logprobs


def column(*values):
    return np.array(values, dtype=np.int32)


def test_each_row_gets_as_many_as_it_wants_and_failed_rows_nothing():
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    values = -ids.float()
    logprobs = Logprobs(
        rows=column(0, 2, 3), positions=column(9, 8, 7), counts=column(1, 2, 3), on_device=()
    )
    columns = logprobs.columns((ids, values), failed=[3])
    assert unpack_int32(columns.rows) == [0, 2]
    assert unpack_int32(columns.positions) == [9, 8]
    assert unpack_int32(columns.n) == [1, 2]
    assert unpack_int32(columns.ids) == [1, 4, 5]
    assert unpack_float32(columns.values) == [-1.0, -4.0, -5.0]
    assert columns.ranks == b""
    ranks = torch.tensor([5, 6, 7], dtype=torch.int32)
    assert unpack_int32(logprobs.columns((ids, values, ranks), [0]).ranks) == [6, 7]
    assert logprobs.columns((ids, values), [0, 2, 3]) is None

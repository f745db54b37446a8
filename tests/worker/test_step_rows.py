import numpy as np
import pytest

from protocol.columns import pack_int32
from worker.step_rows import Chunk, int32_view


def test_a_column_is_viewed_not_copied_and_cannot_be_written() -> None:
    view = int32_view(pack_int32([1, -2, 3]))
    assert view.tolist() == [1, -2, 3]
    assert view.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 9


def test_an_empty_column_is_an_empty_array() -> None:
    assert int32_view(b"").shape == (0,)


def test_a_chunk_ends_after_its_last_token() -> None:
    chunk = Chunk(row=0, slot=1, start=5, token_ids=int32_view(pack_int32([7, 8])), is_last=True)
    assert chunk.end == 7

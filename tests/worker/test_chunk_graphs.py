"""Which steps with chunks become graphs; that they compute the same is test_decode_graphs'."""

from dataclasses import replace

import numpy as np
import pytest

from worker.chunk_graphs import CAPTURED_AT, ChunkGraphs
from worker.chunk_inputs import no_rows
from worker.sampling_slots import Variant
from worker.step_rows import Chunk, StepRows


def chunk_graphs() -> ChunkGraphs:
    return ChunkGraphs(*[None] * 5, max_sequences=100)


def rows_of(num_decode: int, counts: list[int]) -> StepRows:
    chunks = tuple(
        Chunk(row=i, slot=i, start=0, token_ids=np.zeros(count, dtype=np.int32), is_last=True)
        for i, count in enumerate(counts)
    )
    decode = np.arange(num_decode, dtype=np.int32)
    return replace(no_rows(), decode_slots=decode, chunks=chunks)


@pytest.mark.parametrize(
    ("num_decode", "counts", "graph"),
    [
        (0, [1], (16, 8)),
        (3, [13], (16, 8)),
        (4, [13], (32, 8)),
        (8, [8], (16, 64)),
        (63, [900, 61], (1024, 100)),
        (0, [1025], None),
        (100, [1], None),
    ],
)
def test_sizes_are_captured_when_they_come_up_often(num_decode: int, counts: list[int], graph):
    graphs, rows = chunk_graphs(), rows_of(num_decode, counts)
    chosen = [graphs.choose(rows, Variant.PLAIN) for _ in range(CAPTURED_AT)]
    assert chosen[:-1] == [None] * (CAPTURED_AT - 1)
    assert chosen[-1] == (None if graph is None else (*graph, Variant.PLAIN))


def test_edited_logits_have_no_graphs_with_chunks():
    graphs, rows = chunk_graphs(), rows_of(3, [13])
    assert [graphs.choose(rows, Variant.EDITED) for _ in range(9)] == [None] * 9

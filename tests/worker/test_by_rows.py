from collections.abc import Sequence

import pytest
import torch

from tests.worker.plain_kernels import PlainKernels
from worker.attention.base import DecodeRows, LayerAttention
from worker.attention.by_rows import KernelsByRows
from worker.attention.paged import ChunkBatch, DecodeKernel


class Named(PlainKernels):
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    def start_decode(self, rows: DecodeRows, windows: Sequence[int | None]) -> DecodeKernel:
        self.calls.append(f"{self.name} {len(rows.lengths)}")
        return super().start_decode(rows, windows)

    def attend_fresh(self, query, *_):
        self.calls.append(f"{self.name} fresh")
        return query

    def attend_paged(self, query, *_):
        self.calls.append(f"{self.name} paged")
        return query


def decode_rows(count: int) -> DecodeRows:
    return DecodeRows(
        cache_positions=torch.zeros(count, dtype=torch.int64),
        lengths=torch.ones(count, dtype=torch.int32),
        block_tables=torch.zeros(count, 1, dtype=torch.int32),
    )


@pytest.fixture
def chunks() -> ChunkBatch:
    starts = torch.tensor([0, 1], dtype=torch.int32)
    return ChunkBatch(
        query_starts=starts,
        lengths=starts[1:],
        length_starts=starts,
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        max_count=1,
        max_length=1,
        is_fresh=True,
    )


def test_which_kernels(chunks: ChunkBatch):
    calls: list[str] = []
    kernels = KernelsByRows(Named("few", calls), Named("many", calls), most_few=8)
    for count in (1, 8, 9, 256):
        kernels.start_decode(decode_rows(count), [None])
    nothing = torch.zeros(1, 1, 1)
    kernels.attend_fresh(nothing, nothing, nothing, chunks, LayerAttention(1.0, None), None)
    kernels.attend_paged(nothing, nothing, nothing, chunks, LayerAttention(1.0, None), None)
    assert calls == ["few 1", "few 8", "many 9", "many 256", "many fresh", "many paged"]

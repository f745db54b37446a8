"""The real exchange over gloo, its ranks being threads of this process."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from protocol.errors import ProcessError
from tests.worker.thread_ranks import on_all
from worker.parallel import JoinedRanks, OneRank, join_ranks
from worker.rendezvous import meet

CPU = torch.device("cpu")


def join(path: Path, size: int, rank: int, *, timeout_s: float = 20.0) -> JoinedRanks:
    store = meet(path, rank=rank, size=size)
    return join_ranks(store, rank=rank, size=size, timeout_s=timeout_s, device=CPU)


def test_one_rank_gives_back_what_it_gets():
    part = torch.randn(3, 2)
    assert OneRank().all_reduce(part) is part
    assert torch.equal(OneRank().all_gather(part), part[None])
    assert (OneRank().rank, OneRank().size) == (0, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_exchanges(tmp_path: Path, size: int):
    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group = join(tmp_path / "store", size, rank)
        assert (group.rank, group.size) == (rank, size)
        with torch.inference_mode():
            mine = torch.full((2, 3), float(rank + 1))
            total = group.all_reduce(mine)
            assert total is mine
            low = group.all_reduce(torch.full((4,), rank + 0.5, dtype=torch.bfloat16))
            parts = group.all_gather(torch.arange(6.0).view(3, 2).t() * rank)
        return total, low, parts

    expected = torch.stack([torch.arange(6.0).view(3, 2).t() * rank for rank in range(size)])
    for total, low, parts in on_all(partial(run, rank) for rank in range(size)):
        assert total.eq(size * (size + 1) / 2).all()
        assert low.eq(size * size / 2).all()
        assert torch.equal(parts, expected)


def test_bad_numbers_cross_as_they_are(tmp_path: Path):
    bad = torch.tensor([[float("nan"), float("-inf"), float("inf"), 16_777_215.0]])

    def run(rank: int) -> torch.Tensor:
        return join(tmp_path / "store", 2, rank).all_gather(bad)

    for parts in on_all(partial(run, rank) for rank in range(2)):
        torch.testing.assert_close(parts, bad.expand(2, 1, 4), equal_nan=True, rtol=0, atol=0)


def test_a_rank_that_does_not_answer_ends_the_others(tmp_path: Path):
    given_up = threading.Event()

    def run(rank: int) -> None:
        group = join(tmp_path / "store", 2, rank, timeout_s=0.3)
        if rank == 1:
            assert given_up.wait(20)
            return
        try:
            with pytest.raises(ProcessError, match=r"Rank 0 lost .* within 0\.3 s"):
                group.all_reduce(torch.zeros(2))
        finally:
            given_up.set()

    on_all(partial(run, rank) for rank in range(2))

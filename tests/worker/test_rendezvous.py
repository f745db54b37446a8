"""Ranks find each other whatever lies in the file."""

import logging
import os
import time
from functools import partial
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore, Store

from tests.worker.thread_ranks import on_all
from worker.rendezvous import meet, share


def say(store: Store, rank: int) -> list[str]:
    """Leave a word for the others and return all words, in rank order."""
    store.set(f"word/{rank}", f"of {rank}")
    return [store.get(f"word/{other}").decode() for other in range(3)]


def run(path: Path, rank: int, *, late_s: float = 0.0) -> list[str]:
    time.sleep(late_s)
    return say(meet(path, rank=rank, size=3), rank)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_any_order(tmp_path: Path, late: int):
    path = tmp_path / "store"
    words = on_all(partial(run, path, rank, late_s=0.1 * (rank == late)) for rank in range(3))
    assert words == [["of 0", "of 1", "of 2"]] * 3


def test_groups_before_left_entries(tmp_path: Path):
    path = tmp_path / "store"
    for _ in range(2):
        on_all(partial(run, path, rank) for rank in range(3))


def test_ranks_that_died_while_they_met(tmp_path: Path):
    path = tmp_path / "store"
    old = FileStore(str(path))
    first, second = os.urandom(16), os.urandom(16)
    old.set("hello", first.hex())
    old.set("ack/1", (first + second).hex())
    old.set("go", (first + second + second).hex())
    words = on_all(partial(run, path, rank, late_s=0.1 * (rank == 0)) for rank in range(3))
    assert words == [["of 0", "of 1", "of 2"]] * 3


def test_says_what_it_waits_for(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch):
    monkeypatch.setattr("worker.rendezvous._FIRST_WORD_S", 0.05)
    with caplog.at_level(logging.INFO):
        on_all(partial(run, tmp_path / "store", rank, late_s=0.3 * (rank > 1)) for rank in range(3))
    assert {record.getMessage() for record in caplog.records} == {
        "waits for rank 2",
        "waits for rank 0 and the others",
    }


def test_rank_0s_text_goes_to_all(tmp_path: Path):
    def run_share(rank: int) -> str:
        store = meet(tmp_path / "store", rank=rank, size=3)
        return share(store, "table", "of rank 0" if rank == 0 else None)

    assert on_all(partial(run_share, rank) for rank in range(3)) == ["of rank 0"] * 3

"""The ring of results; what is captured is tested with the steps (test_decode_graphs)."""

import torch

from worker.graph_store import RING, GraphStore


def test_a_result_stays_while_the_next_ones_come():
    store = GraphStore(max_rows=4, device=torch.device("cpu"))
    kept = []
    for step in range(RING):
        assert store.free_ring == step
        ring = store.take_ring()
        store.keep(torch.tensor([ring]), torch.full((3,), step, dtype=torch.int32))
        kept.append(store.results(ring, 2))
    assert [result.tolist() for result in kept] == [[step] * 2 for step in range(RING)]
    assert store.take_ring() == 0


class Scarce(GraphStore):
    """Has memory for one graph."""

    def _captured(self, step):
        if self._graphs:
            raise torch.OutOfMemoryError("no memory")
        step()
        return Replayed()


class Replayed:
    count = 0

    def replay(self) -> None:
        Replayed.count += 1


def test_without_memory_steps_run_eagerly_and_nothing_more_is_captured(caplog):
    store = Scarce(max_rows=1, device=torch.device("cpu"))
    ran: list[str] = []
    for name in ("first", "second"):
        assert store.wants(name)
        store.capture(name, lambda name=name: ran.append(f"captured {name}"))
    assert not any(store.wants(name) for name in ("first", "second", "third"))
    before = Replayed.count
    for name in ("first", "second", "third"):
        store.run(name, lambda name=name: ran.append(f"ran {name}"))
    assert ran == ["captured first", "ran second", "ran third"]
    assert Replayed.count == before + 1
    assert "no memory for further graphs count=1" in caplog.text

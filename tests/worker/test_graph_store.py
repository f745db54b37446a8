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


def test_names():
    store = GraphStore(max_rows=1, device=torch.device("cpu"))
    assert ("decode", 1) not in store
    assert len(store) == 0

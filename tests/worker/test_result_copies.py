"""Copies that need a GPU; what a step makes of its results is test_model_runner's."""

import pytest
import torch

from worker.graph_store import RING
from worker.result_copies import HostResults, ResultCopies


def test_results_on_the_host_are_there():
    results = HostResults(torch.tensor([1, 2]), ())
    assert results.are_there()
    results.wait()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_steps_under_way_keep_their_results_apart():
    device = torch.device("cuda")
    copies = ResultCopies(max_rows=8, device=device)
    for step in range(3 * RING):
        first, second = (
            copies.start(
                torch.full((4,), 10 * step + index, dtype=torch.int32, device=device),
                [torch.full((2, 3), 0.5, device=device)],
            )
            for index in range(2)
        )
        first.wait()
        assert first.are_there()
        second.wait()
        assert first.reported.tolist() == [10 * step] * 4
        assert second.reported.tolist() == [10 * step + 1] * 4
        assert second.others[0].tolist() == [[0.5] * 3] * 2

import itertools
from pathlib import Path

import pytest
import torch

from worker.huge_pages import HUGE_PAGE_BYTES, advise_huge_pages


def test_small_tensors_are_left_alone():
    assert not advise_huge_pages(torch.empty(1000))


def test_a_large_tensor_gets_them():
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not modes.exists() or "[never]" in modes.read_text():
        pytest.skip("this kernel gives none")
    # Not of a size that the allocator keeps for the next: that memory would not be fresh.
    tensor = torch.empty(65 << 20, dtype=torch.uint8)
    assert advise_huge_pages(tensor)
    tensor[4 * HUGE_PAGE_BYTES] = 1
    maps = Path("/proc/self/smaps").read_text().split("\nVmFlags:")
    address = tensor.data_ptr() + 4 * HUGE_PAGE_BYTES
    flags = None
    for mapping, following in itertools.pairwise(maps):
        first = next(line for line in mapping.splitlines() if "-" in line.split(" ")[0])
        begin, end = (int(side, 16) for side in first.split(" ")[0].split("-"))
        if begin <= address < end:
            flags = following.splitlines()[0].split()
    assert flags is not None
    assert "hg" in flags


def test_values_are_kept():
    tensor = torch.arange(HUGE_PAGE_BYTES, dtype=torch.int32)
    advise_huge_pages(tensor)
    assert torch.equal(tensor, torch.arange(HUGE_PAGE_BYTES, dtype=torch.int32))

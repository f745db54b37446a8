import ctypes

import pytest

from worker.cuda_driver import gpu_memory


class Driver:
    """Answers as NVIDIA's driver does, for GPUs of these bytes."""

    def __init__(self, sizes: list[int], *, fails: bool = False) -> None:
        self._sizes = sizes
        self._fails = fails

    def cuInit(self, _: int) -> int:  # noqa: N802 - the driver's names
        return 100 if self._fails else 0

    def cuDeviceGetCount(self, count) -> int:  # noqa: N802
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = len(self._sizes)
        return 0

    def cuDeviceGet(self, device, index: int) -> int:  # noqa: N802
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = 10 + index
        return 0

    def cuDeviceTotalMem_v2(self, size, device) -> int:  # noqa: N802
        index = device.value - 10
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = self._sizes[index]
        return 0


@pytest.mark.parametrize("sizes", [[], [5], [80 << 30, 40 << 30]])
def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch, sizes: list[int]):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(sizes))
    assert list(gpu_memory()) == sizes


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert list(gpu_memory()) == []
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver([5], fails=True))
    assert list(gpu_memory()) == []

"""What NVIDIA's driver says about the GPUs, asked without loading torch."""

import ctypes
from collections.abc import Sequence


def gpu_memory() -> Sequence[int]:
    """Return the bytes of memory of each GPU that the driver shows; none without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    sizes = []
    for index in range(count.value):
        device, size = ctypes.c_int(0), ctypes.c_size_t(0)
        if driver.cuDeviceGet(ctypes.byref(device), index):
            return ()
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        sizes.append(size.value)
    return sizes

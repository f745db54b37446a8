"""Large pages for large tensors.

The kernel gives fresh memory out by pages of 4 KiB, each cleared and entered at its first write:
reading a file into it then takes three times as long as reading it into memory in use. By pages of
2 MiB it takes hardly longer, and computing with the weights later misses fewer page table entries.
"""

import ctypes

import torch

_MADV_HUGEPAGE = 14
_PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask for large pages behind a contiguous tensor in host memory, before it is first written.

    Whether the kernel agreed; small tensors are not asked for, and a refusal harms nothing.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < HUGE_PAGE_BYTES:
        return False
    first = -(-tensor.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // _PAGE_BYTES * _PAGE_BYTES
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(first, end - first, _MADV_HUGEPAGE) == 0)

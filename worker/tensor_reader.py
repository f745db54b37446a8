"""Reads numbers from files into tensors: by several threads, in the file's order, never mapped.

A mapped file costs a page fault for every few pages, and kills the process where it turns out
shorter than it was. Here each thread copies with `preadv` from the system's file cache to where
the numbers belong: into the tensor itself where it holds the same dtype in host memory, else into
a buffer of its own, from which it converts or uploads them while a core's cache still has them.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.errors import ModelFileError
from worker.finite import all_finite
from worker.huge_pages import advise_huge_pages

_MAX_THREADS = 8
"""More only wait for each other in the kernel."""
_READ_BYTES = 1 << 18
"""A read, whose numbers are looked at while the core's own cache has them."""
_CONVERTED_BYTES = 1 << 20
_UPLOAD_BYTES = 8 << 20
_DIRECT_BYTES = 16 << 20
"""What a thread is given at a time to read without a buffer: enough for giving not to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """A rank's part of one tensor in a file, and the memory that wants it.

    The part is what `target` has room for from `start` on in dimension `dim` of `shape`; the other
    dimensions are whole.
    """

    name: str
    offset: int
    """Bytes from the start of the file to the tensor's."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The whole tensor's; at least one dimension."""
    dim: int
    start: int
    target: Tensor

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes) of what rows `first` to `last` of the target need of the file."""
        inner = math.prod(self.shape[self.dim + 1 :]) * self.dtype.itemsize
        begin = self.offset + self.start * inner
        if self.dim == 0 or self.target.shape == self.shape:
            row = math.prod(self.shape[1:]) * self.dtype.itemsize
            yield begin + first * row, (last - first) * row
            return
        runs_a_row = math.prod(self.shape[1 : self.dim])
        for index in range(first * runs_a_row, last * runs_a_row):
            yield begin + index * self.shape[self.dim] * inner, self.target.shape[self.dim] * inner

    @property
    def is_direct(self) -> bool:
        """Whether the file's bytes are what the target's memory will hold."""
        target = self.target
        return target.device.type == "cpu" and target.dtype == self.dtype and target.is_contiguous()


def reading_threads(ranks: int) -> int:
    """Return how many threads each of some ranks should read with."""
    # At least two: while the disk makes one wait, the other works.
    return max(2, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // ranks))


@contextlib.contextmanager
def reading_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield threads in which torch computes without threads of its own.

    Teams for such small pieces would wait for each other more than they compute.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # taken over by threads that start from now on
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="read") as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def finish(futures: Sequence[Future[int]]) -> int:
    """Wait for all, and return the sum of their results; the first to fail ends the others."""
    try:
        return sum(future.result() for future in futures)
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def open_to_read(path: Path) -> int:
    """Return a file descriptor. Raises ModelFileError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error


def read_parts(path: Path, parts: Sequence[StoredPart], *, threads: int) -> int:
    """Fill the targets of parts of one file and return the bytes read.

    Raises ModelFileError naming the file, and the tensor that is cut off, NaN or infinite.
    """
    for part in parts:
        advise_huge_pages(part.target)
    descriptor = open_to_read(path)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        reader = _Reader(descriptor, path, _buffers(parts, threads))
        with reading_pool(threads) as pool:
            futures = [
                pool.submit(reader.read, part, first, last)
                for part in sorted(parts, key=lambda part: part.offset)
                for first, last in _rows(part)
            ]
            return finish(futures)
    finally:
        os.close(descriptor)


def _rows(part: StoredPart) -> Iterator[tuple[int, int]]:
    """Divide a part's rows into runs for one thread at a time."""
    if not part.target.numel():
        return
    step = max(1, _piece_bytes(part) // _row_bytes(part))
    for first in range(0, len(part.target), step):
        yield first, min(first + step, len(part.target))


def _piece_bytes(part: StoredPart) -> int:
    if part.is_direct:
        return _DIRECT_BYTES
    return _UPLOAD_BYTES if part.target.is_cuda else _CONVERTED_BYTES


def _row_bytes(part: StoredPart) -> int:
    """Return the bytes of a row of a rank's part in the file."""
    return math.prod(part.target.shape[1:]) * part.dtype.itemsize


def _buffers(parts: Sequence[StoredPart], threads: int) -> "SimpleQueue[Tensor]":
    """Return a buffer for each thread, if any part needs one: pinned ones where a GPU reads."""
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    staged = [part for part in parts if not part.is_direct and part.target.numel()]
    if staged:
        size = max(max(_piece_bytes(part), _row_bytes(part)) for part in staged)
        is_pinned = any(part.target.is_cuda for part in staged)
        for _ in range(threads):
            buffers.put(torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned))
    return buffers


class _Reader:
    """What the threads share: the file, and buffers of which each holds one at a time."""

    def __init__(self, descriptor: int, path: Path, buffers: "SimpleQueue[Tensor]") -> None:
        self._descriptor = descriptor
        self._path = path
        self._buffers = buffers

    @torch.inference_mode()
    def read(self, part: StoredPart, first: int, last: int) -> int:
        """Fill some rows of a part's target; return the bytes read. Raises ModelFileError."""
        rows = part.target[first:last]
        if part.is_direct:
            memory = rows.reshape(-1).view(torch.uint8)
            self._fill(part, first, last, memory.numpy())
            return memory.nbytes
        buffer = self._buffers.get()
        try:
            staged = buffer[: rows.numel() * part.dtype.itemsize]
            self._fill(part, first, last, staged.numpy())
            numbers = staged.view(part.dtype).view(rows.shape)
            # Uploaded as it is stored, so that a GPU does the converting.
            rows.copy_(numbers if numbers.dtype == rows.dtype else numbers.to(rows.device))
            return staged.nbytes
        finally:
            self._buffers.put(buffer)

    def _fill(self, part: StoredPart, first: int, last: int, memory: NDArray[np.uint8]) -> None:
        view = memory.data
        at = looked = 0
        for begin, size in self._announced(part, first, last):
            for offset in range(begin, begin + size, _READ_BYTES):
                end = at + min(_READ_BYTES, begin + size - offset)
                read_exactly(self._descriptor, self._path, part.name, view[at:end], offset)
                at = end
                if at - looked >= _READ_BYTES or at == len(memory):
                    if not all_finite(memory[looked:at], part.dtype):
                        raise not_finite(self._path, part.name)
                    looked = at

    def _announced(self, part: StoredPart, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield runs of bytes, having told the system of them where they have gaps.

        It reads ahead by itself only for who reads without gaps.
        """
        runs = part.runs(first, last)
        if part.dim and part.target.shape != part.shape:
            runs = iter(known := list(runs))
            begin, end = known[0][0], sum(known[-1])
            os.posix_fadvise(self._descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)
        yield from runs


def read_exactly(descriptor: int, path: Path, name: str, memory: memoryview, offset: int) -> None:
    """Fill memory from a place in a file. Raises ModelFileError naming file and tensor."""
    at = 0
    while at < len(memory):
        try:
            count = os.preadv(descriptor, [memory[at:]], offset + at)
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
        if count == 0:
            raise ModelFileError(f"{path} ends inside the tensor {name}: it is truncated")
        at += count


def not_finite(path: Path, name: str) -> ModelFileError:
    """Return the sentence about a tensor with broken values."""
    return ModelFileError(
        f"{path}: the tensor {name} has values that are NaN or infinite; the model was saved "
        "broken or the file is damaged"
    )

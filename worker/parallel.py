"""How the ranks of a tensor-parallel group exchange tensors.

Layers and the sampler receive a `TensorParallel`. One rank alone is `OneRank`, which exchanges
nothing; several are `JoinedRanks`, over gloo on CPU and NCCL on CUDA. Only tensors cross, never
objects, and nothing here is global: there is no default process group.

Every rank calls the same exchanges in the same order with tensors of the same shape. That holds
because all ranks run the same plans, and what they compute follows from plans alone.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

# torch.distributed has the same names, but not for a type checker.
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

from protocol.errors import ProcessError


class _Exchanges(Protocol):
    """What is used of torch's process groups, whose own types leave it out."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def _allgather_base(self, output: Tensor, part: Tensor) -> Work: ...


class TensorParallel(Protocol):
    """One rank's place in its group."""

    @property
    def rank(self) -> int:
        """From 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts; may reuse `part`. Raises ProcessError."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """Return all ranks' parts in rank order, [size, *part.shape]. Raises ProcessError."""
        ...


class OneRank:
    """A group of one, in which nothing has to be exchanged."""

    rank = 0
    size = 1

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the part, which is the sum."""
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        """Return the part as the only one. [1, *part.shape]"""
        return part.unsqueeze(0)


class JoinedRanks:
    """A group of ranks that have met (`worker.rendezvous`), over one process group of torch."""

    def __init__(self, group: _Exchanges, *, rank: int, size: int, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self.rank = rank
        self.size = size

    def all_reduce(self, part: Tensor) -> Tensor:
        """Add up all ranks' parts in place; the same bits on every rank."""
        self._wait(lambda: self._group.allreduce([part]))
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        """Return all ranks' parts in rank order. [size, *part.shape]"""
        part = part.contiguous()
        whole = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        self._wait(lambda: self._group._allgather_base(whole, part))
        return whole.view(self.size, *part.shape)

    def _wait(self, start: Callable[[], Work]) -> None:
        """Start an exchange and wait for it: on CUDA only the current stream does."""
        try:
            start().wait()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).partition("\n")[0]
            raise ProcessError(
                f"Rank {self.rank} lost the other ranks: one has ended or did not answer within "
                f"{self._timeout_s:g} s ({reason})."
            ) from error


def join_ranks(
    store: Store, *, rank: int, size: int, timeout_s: float, device: torch.device
) -> JoinedRanks:
    """Connect the ranks of a group of several; each must call this with the same fresh store.

    An exchange that takes longer than `timeout_s` fails on every rank: with gloo by a ProcessError,
    with NCCL by torch's watchdog, which kills the process within another minute. Raises
    ProcessError if a rank does not connect in that time.
    """
    connect = _connect_nccl if device.type == "cuda" else _connect_gloo
    try:
        group = connect(store, rank, size, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ProcessError(
            f"Rank {rank} cannot connect to the other {size - 1} ranks: {reason}"
        ) from error
    return JoinedRanks(group, rank=rank, size=size, timeout_s=timeout_s)


def _connect_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> _Exchanges:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub says Options
    options._timeout = timeout
    # Left to itself gloo listens on whatever address the host's name resolves to.
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1
    group: _Exchanges = ProcessGroupGloo(store, rank, size, options)  # type: ignore[assignment]
    return group


def _connect_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> _Exchanges:
    # Imported here because torch for CPUs does not have it.
    from torch._C._distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415

    # NCCL takes these from nowhere else. The launcher sets them; a rank started by hand needs them.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    group: _Exchanges = ProcessGroupNCCL(store, rank, size, options)  # type: ignore[assignment]
    # NCCL connects at the first exchange, which must not be in a step or in a graph's capture.
    group.allreduce([torch.zeros(1, device="cuda")]).wait()
    torch.cuda.synchronize()
    return group

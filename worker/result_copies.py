"""Results on their way to the host, on a stream of their own.

    steps     ── step N ──┬── step N + 1 ──┬──
                          │ computed       │
    copies                └─► copy ─► done └─►

The next step need not wait for the copy. Buffers and events are used in turn: a step's are free
again once RING more have been launched, of which no more than two are under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.graph_store import RING


@dataclass(frozen=True, slots=True)
class HostResults:
    """A step's results on the host, once it is done."""

    reported: Tensor
    """[rows] int32, valid until RING more steps have been launched."""
    others: tuple[Tensor, ...]
    done: torch.cuda.Event | None = None
    """None: it is done."""
    sources: tuple[Tensor, ...] = ()
    """What is being copied, which must live until then."""

    def are_there(self) -> bool:
        """Return whether everything is on the host."""
        return self.done is None or self.done.query()

    def wait(self) -> None:
        """Return once it is."""
        if self.done is not None:
            self.done.synchronize()


class ResultCopies:
    """The stream, its buffers and events."""

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._host = torch.zeros(RING, max_rows, dtype=torch.int32, pin_memory=True)
        self._computed = [torch.cuda.Event() for _ in range(RING)]
        self._done = [torch.cuda.Event() for _ in range(RING)]
        self._next = 0

    def start(self, reported: Tensor, others: Sequence[Tensor] = ()) -> HostResults:
        """Copy what the current stream is about to have computed. `reported` is [rows] int32"""
        ring = self._next
        self._next = (ring + 1) % RING
        host, computed, done = self._host[ring], self._computed[ring], self._done[ring]
        computed.record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            host = host[: len(reported)].copy_(reported, non_blocking=True)
            copies = tuple(
                torch.empty(other.shape, dtype=other.dtype, pin_memory=True).copy_(
                    other, non_blocking=True
                )
                for other in others
            )
            done.record()
        return HostResults(host, copies, done, (reported, *others))

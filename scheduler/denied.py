"""Who was denied admission for want of blocks, and whether there is any point in asking again."""

from typing import NamedTuple

from scheduler.sequence import WAITING, Sequence


class _Verdict(NamedTuple):
    """A sequence that needed more blocks than were free, and how things were."""

    sequence: Sequence
    num_free: int
    num_running: int
    num_chunks: int


class Denied:
    """Remembers the last denial.

    What a sequence needs is only known once the prefix index has been walked. It needs no less, and
    there is no more for it, until a block becomes free, a sequence ends or somebody's chunk has
    been computed.
    """

    def __init__(self) -> None:
        self._verdict: _Verdict | None = None
        self._blocked: Sequence | None = None
        self._num_chunks = 0

    @property
    def waits(self) -> Sequence | None:
        """Who was the last to be denied, as long as it waits."""
        if self._blocked is None or self._blocked.status not in WAITING:
            return None
        return self._blocked

    def still_holds(self, sequence: Sequence, *, num_free: int, num_running: int) -> bool:
        """Return whether a sequence was denied, and nothing has become better for it since."""
        last = self._verdict
        return (
            last is not None
            and last.sequence is sequence
            and num_free <= last.num_free
            and num_running >= last.num_running
            and self._num_chunks == last.num_chunks
        )

    def deny(self, sequence: Sequence, *, num_free: int, num_running: int) -> None:
        """Note that a sequence needs more blocks than are free."""
        self._verdict = _Verdict(sequence, num_free, num_running, self._num_chunks)
        self._blocked = sequence

    def admitted(self, sequence: Sequence) -> None:
        """Note that a sequence, denied before or not, runs now."""
        self._verdict = None
        if sequence is self._blocked:
            self._blocked = None

    def computed_chunk(self) -> None:
        """Note that others may share more than before."""
        self._num_chunks += 1

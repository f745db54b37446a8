"""What a frontend knows of the scheduler's waiting queue, to refuse what has no room there.

The scheduler decides. But it can only do so once a prompt has been tokenized and sent, and a queue
that is full is no reason for that work: what is known to be in vain is refused here, before it.
"""

import contextlib
from collections.abc import Iterator

import msgspec

from protocol.errors import ErrorCode, RequestError
from protocol.messages import ErrorInfo, Ping


class KnownQueue:
    """The scheduler's last Ping, and what has been done since."""

    def __init__(self) -> None:
        self._ping = Ping(retry_after_s=1)
        self._sent_sequences = 0
        self._sent_tokens = 0
        self._in_preparation = 0

    @property
    def retry_after_s(self) -> int:
        """Whole seconds after which there may be room, as the scheduler estimates it."""
        return self._ping.retry_after_s

    def take(self, ping: Ping) -> None:
        """Take the scheduler's word for how things are now."""
        self._ping = ping
        self._sent_sequences = self._sent_tokens = 0

    def count(self, num_tokens: int) -> None:
        """Note that a sequence has been sent."""
        self._sent_sequences += 1
        self._sent_tokens += num_tokens

    @contextlib.contextmanager
    def preparing(self, num_sequences: int) -> Iterator[None]:
        """Count sequences that will be sent soon."""
        self._in_preparation += num_sequences
        try:
            yield
        finally:
            self._in_preparation -= num_sequences

    def check_room(self, num_sequences: int, num_tokens: int) -> None:
        """Raise RequestError (OVERLOADED) if sequences of so many tokens each would be refused.

        Where nobody waited, what came since may run already: then the scheduler is asked.
        """
        ping = self._ping
        if not ping.waiting_requests:
            return
        waiting = ping.waiting_requests + self._sent_sequences + self._in_preparation
        if waiting + num_sequences > ping.max_waiting_requests:
            raise self.overloaded(
                f"{waiting} sequences are waiting already, and {ping.max_waiting_requests} are the "
                "most that may"
            )
        tokens = ping.waiting_tokens + self._sent_tokens
        if tokens + num_sequences * num_tokens > ping.max_waiting_tokens:
            raise self.overloaded(
                f"{tokens} tokens are waiting already, and {ping.max_waiting_tokens} are the most "
                "that may"
            )

    def explain(self, error: ErrorInfo) -> ErrorInfo:
        """Return a sequence's error; of a refusal for want of room, with when to try again."""
        if error.code is not ErrorCode.OVERLOADED:
            return error
        return msgspec.structs.replace(error, retry_after_s=self.retry_after_s)

    def overloaded(self, why: str) -> RequestError:
        """Return a refusal that says when to try again; `why` begins its sentence."""
        return RequestError(
            ErrorCode.OVERLOADED,
            f"{why}; try again in {self.retry_after_s} s.",
            retry_after_s=self.retry_after_s,
        )

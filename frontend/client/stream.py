"""One request's output while it is made, for a blocking reader."""

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from frontend.client.link import Link
from frontend.client.requests import Prompt
from frontend.client.results import Delta, Event, Generation
from frontend.client.stream_progress import StreamProgress
from protocol.messages import Generate


class Stream:
    """Yields the deltas of one request; leaving it early, however that comes, aborts the request.

        for delta in client.stream("Once upon a time"):
            print(delta.text, end="")

    Raises RequestError if the request is refused or fails, EngineTimeoutError if neither a delta
    nor a new position in the queue comes for timeout_s seconds, EngineGoneError if the engine ends.
    """

    def __init__(
        self,
        link: Link,
        prompt: Prompt,
        request: Generate,
        *,
        on_position: Callable[[int], object] | None,
        timeout_s: float,
    ) -> None:
        """Sends the request; use `Client.stream`."""
        self._progress = StreamProgress(prompt, request.params.n, on_position)
        self._link = link
        self._timeout_s = timeout_s
        self._events: deque[Event] = deque()
        self._progress.has_ended = True
        with link.session() as session:
            self.request_id = session.submit(request, self._events.append)
        self._progress.has_ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while not self._progress.has_ended:
            delta = self._progress.take(self._next_event())
            if delta is not None:
                return delta
        raise StopIteration

    def _next_event(self) -> Event:
        with self._link.reserved():
            try:
                if not self._events:
                    self._link.wait(lambda: bool(self._events), self._timeout_s)
            except BaseException:
                self.close()
                raise
            return self._events.popleft()

    @property
    def queue_position(self) -> int | None:
        """In the engine's queue, as it last said: 1 is the next, 0 admitted; None: not known."""
        return self._progress.queue_position

    def result(self) -> Generation:
        """Return what has come so far, put together; all of it once the stream has ended."""
        return self._progress.result()

    def close(self) -> None:
        """Abort the request if it has not ended. Does not wait and never raises."""
        if not self._progress.has_ended:
            self._progress.has_ended = True
            self._link.leave(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A loop that is left by `break` or an exception drops its stream without closing it.
        self.close()

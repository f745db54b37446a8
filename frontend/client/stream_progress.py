"""What a stream knows of its request, however its reader waits for events."""

from collections.abc import Callable

from frontend.client.requests import Prompt
from frontend.client.results import Delta, Event, Generation, GenerationBuilder, Queued


class StreamProgress:
    """Takes in a request's events: its output, its place in the queue, its end."""

    def __init__(
        self, prompt: Prompt, num_samples: int, on_position: Callable[[int], object] | None
    ) -> None:
        """`on_position` is called with every new place in the engine's queue."""
        self.has_ended = False
        self.queue_position: int | None = None
        """As the engine last said: 1 is the next, 0 admitted; None: not known."""
        self._on_position = on_position
        self._builder = GenerationBuilder(0, prompt, num_samples)

    def take(self, event: Event) -> Delta | None:
        """Return what the reader gets of an event, None if nothing.

        Raises the error that the request has ended with.
        """
        if isinstance(event, Delta):
            if self.queue_position:
                self._move_to(0)
            self._builder.add(event)
            return event
        if isinstance(event, Queued):
            self._move_to(event.position)
            return None
        self.has_ended = True
        if event.error is not None:
            raise event.error
        return None

    def result(self) -> Generation:
        """Return what has come so far, put together."""
        return self._builder.build()

    def _move_to(self, position: int) -> None:
        self.queue_position = position
        if self._on_position is not None:
            self._on_position(position)

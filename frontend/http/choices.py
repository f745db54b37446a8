"""All choices of one HTTP request: several prompts times several samples, through one queue.

The index of a choice is (prompt's index) * n + sample.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from starlette.types import Receive

from frontend.deltas import DeltaQueue, SampleDelta
from frontend.engine_client import EngineClient
from frontend.generation import GenerationRequest
from frontend.live_request import LiveRequest
from protocol.messages import SamplingParams, Usage


class ChoiceDelta(NamedTuple):
    """What one choice has gained."""

    choice: int
    """Its index."""
    delta: SampleDelta


class Choices:
    """Live requests, read as one. Close it: what has not ended is aborted then."""

    def __init__(
        self, engine: EngineClient, requests: Sequence[LiveRequest], queue: DeltaQueue
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._queue = queue
        self._first_index: dict[int, int] = {}
        self.count = 0
        """How many choices there are."""
        self.queue_position: int | None = None
        """Of the first to be admitted, at the last `take`; 0: one has been; None: not known."""
        self._positions: dict[int, int] = {}
        for request in requests:
            self._first_index[request.request_id] = self.count
            self.count += len(request.samples)

    async def take(self) -> list[ChoiceDelta]:
        """Wait for news; nothing after a nudge, or if only the position has changed."""
        deltas = await self._queue.take()
        self._positions |= self._queue.take_positions()
        self.queue_position = min(self._positions.values(), default=None)
        return [
            ChoiceDelta(self._first_index[delta.request_id] + delta.sample, delta)
            for delta in deltas
        ]

    def nudge(self) -> None:
        """Wake whoever waits in `take`."""
        self._queue.nudge()

    def usage(self) -> Usage:
        """Return the tokens taken so far."""
        each = [request.usage() for request in self._requests]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in each),
            completion_tokens=sum(usage.completion_tokens for usage in each),
            cached_tokens=sum(usage.cached_tokens for usage in each),
        )

    @property
    def params(self) -> SamplingParams:
        """What is in effect for the first choice."""
        return self._requests[0].samples[0].sequence.params

    def close(self) -> None:
        """Abort what has not ended."""
        for request in self._requests:
            self._engine.abort(request)


async def start_choices(engine: EngineClient, requests: Sequence[GenerationRequest]) -> Choices:
    """Start all requests, or none. Raises RequestError."""
    prepared = [await engine.prepare(request) for request in requests]
    queue = DeltaQueue()
    return Choices(engine, [engine.start(request, queue) for request in prepared], queue)


class ClientWatch:
    """Whether the client is still there."""

    def __init__(self) -> None:
        self.is_gone = False


@contextlib.contextmanager
def watch_client(receive: Receive, choices: Choices) -> Iterator[ClientWatch]:
    """Watch for the client's leaving; it nudges the reader of the choices."""
    watch = ClientWatch()

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        watch.is_gone = True
        choices.nudge()

    task = asyncio.create_task(wait_for_disconnect())
    try:
        yield watch
    finally:
        task.cancel()

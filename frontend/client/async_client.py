"""The asyncio client."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from frontend.client.address import resolve_address
from frontend.client.async_link import AsyncLink
from frontend.client.async_stream import AsyncStream
from frontend.client.batch import Batch
from frontend.client.client import (
    CONNECT_TIMEOUT_S,
    GENERATE_TIMEOUT_S,
    REPLY_TIMEOUT_S,
    SILENCE_LIMIT_S,
    STREAM_TIMEOUT_S,
)
from frontend.client.errors import ClientUseError
from frontend.client.requests import Params, Prompt, Prompts, build_request
from frontend.client.results import Event, Generation
from frontend.client.window import FIRST_WINDOW, window_for
from protocol.messages import SamplingParams, StatusReply


class AsyncClient:
    """A connection to a running engine, for any number of tasks of one event loop.

        async with AsyncClient("/path/of/run-dir") as client:
            async for delta in client.stream("Once upon a time"):
                print(delta.text, end="")

    Every wait is bounded, and cancelling any call aborts its requests. Once the engine has gone,
    each call raises the same EngineGoneError; make a new client for a new engine.
    """

    def __init__(
        self,
        address: str | Path,
        *,
        window: int | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        """Settle where the engine is; `async with` or `connect` connects.

        The arguments are those of `Client`. Raises ConfigError for an address that cannot be one.
        """
        self.address = resolve_address(address)
        self._window = window
        self._connect_timeout_s = connect_timeout_s
        self._silence_limit_s = silence_limit_s
        self._link: AsyncLink | None = None

    async def connect(self) -> Self:
        """Connect to the frontend and wait until it answers.

        Raises EngineGoneError if nothing answers within connect_timeout_s, ProtocolError if
        another version does.
        """
        if self._link is not None:
            raise ClientUseError("This client has been connected before; make a new one.")
        self._link = AsyncLink(
            self.address,
            window=self._window or FIRST_WINDOW,
            silence_limit_s=self._silence_limit_s,
        )
        try:
            await self._link.greet(self._connect_timeout_s)
            status = await self._link.status(self._connect_timeout_s)
        except BaseException:
            await self._link.close()
            raise
        if self._window is None:
            self._link.session.window = window_for(status)
        return self

    async def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        on_result: Callable[[Generation], object] | None = None,
        return_errors: bool = False,
        text_options: Mapping[str, object] | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> list[Generation]:
        """Generate from one prompt or many, and return the results in the order of the prompts.

        As `Client.generate`; calls of several tasks share the engine.
        """
        batch = Batch(
            prompts,
            params,
            on_result=on_result,
            return_errors=return_errors,
            text_options=text_options,
            priority=priority,
            deadline_s=deadline_s,
        )
        events: asyncio.Queue[Event] = asyncio.Queue()
        link = self._connected()
        try:
            batch.submit(link.session, events.put_nowait)
            while not batch.is_done:
                batch.take(await link.next_event(events, timeout_s))
        finally:
            batch.abort_rest(link.session)
        return batch.results()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        text_options: Mapping[str, object] | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        on_position: Callable[[int], object] | None = None,
        timeout_s: float = STREAM_TIMEOUT_S,
    ) -> AsyncStream:
        """Generate from one prompt and return its output as it is made. As `Client.stream`."""
        request = build_request(
            prompt,
            params,
            stream=True,
            text_options=text_options,
            priority=priority,
            deadline_s=deadline_s,
        )
        return AsyncStream(
            self._connected(), prompt, request, on_position=on_position, timeout_s=timeout_s
        )

    async def abort(
        self, request_id: int | None = None, *, timeout_s: float = REPLY_TIMEOUT_S
    ) -> None:
        """End a stream's request, or all of this client's. As `Client.abort`."""
        link = self._connected()
        ids = link.session.live_request_ids if request_id is None else [request_id]
        await link.abort(ids, timeout_s)

    async def status(self, *, timeout_s: float = REPLY_TIMEOUT_S) -> StatusReply:
        """Ask how the engine is. Raises EngineTimeoutError, EngineGoneError."""
        return await self._connected().status(timeout_s)

    async def reset_prefix_cache(self, *, timeout_s: float = REPLY_TIMEOUT_S) -> int:
        """Have the engine forget every cached prefix. As `Client.reset_prefix_cache`."""
        return await self._connected().reset_cache(timeout_s)

    async def close(self) -> None:
        """Abort what still runs, waiting a second at most, and close the connection."""
        if self._link is not None:
            await self._link.close()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _connected(self) -> AsyncLink:
        if self._link is None:
            raise ClientUseError(
                "This client is not connected: use `async with`, or await its connect() first."
            )
        return self._link

"""The asyncio client's connection: one socket, one session, and the task that serves them."""

import asyncio
import contextlib
import os
import time
from typing import TypeVar

import zmq.asyncio

from frontend.client.errors import (
    ClientUseError,
    EngineGoneError,
    EngineTimeoutError,
    closed,
    no_hello,
    too_slow,
)
from frontend.client.link import CLOSE_TIMEOUT_S, FLUSH_S
from frontend.client.pulse import Pulse
from frontend.client.results import read_cache_reset
from frontend.client.session import Failed, Session
from protocol.channels import AsyncDealer
from protocol.errors import EngineError
from protocol.messages import AbortAck, CacheReset, Hello, StatusReply
from protocol.peer_watch import AsyncPeerWatch

Answer = TypeVar("Answer", Hello, StatusReply, CacheReset)
Event = TypeVar("Event")

LAST_WORDS_S = 0.1
"""How long is still read of an engine that has left."""
FRAMES_IN_A_ROW = 64
"""Frames after which other tasks get their turn."""


class AsyncLink:
    """A session with one frontend, over a socket, in the event loop that made it."""

    def __init__(self, address: str, *, window: int, silence_limit_s: float) -> None:
        """`address` as a socket takes it. Raises ConfigError if it takes it not."""
        self.address = address
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        try:
            self._dealer = AsyncDealer(self._context, address, bind=False)
        except EngineError:
            self._context.destroy(linger=0)
            raise
        self._watch = AsyncPeerWatch(self._dealer)
        self._session = Session(address, self._dealer.send, window=window)
        self._pulse = Pulse(self._session, silence_limit_s=silence_limit_s, now=time.monotonic())
        self._serving = self._loop.create_task(self._serve())

    @property
    def session(self) -> Session:
        """The session. Raises ClientUseError outside its event loop."""
        if asyncio.get_running_loop() is not self._loop:
            raise ClientUseError(
                "This client belongs to another event loop; give each loop a client of its own."
            )
        return self._session

    def leave(self, request_id: int) -> None:
        """Abort a request as soon as the event loop comes round. For finalizers; never raises."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed, and all with it
            self._loop.call_soon_threadsafe(self._session.abort, request_id)

    async def next_event(self, events: "asyncio.Queue[Event]", timeout_s: float) -> Event:
        """Wait for the next event of a call. Raises EngineTimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await events.get()
        except TimeoutError as error:
            raise too_slow(self.address, timeout_s) from error

    # --------------------------------------------------------------------------
    # Questions with one answer

    async def greet(self, timeout_s: float) -> None:
        """Say Hello and wait for the frontend's. Raises EngineGoneError."""
        answers: asyncio.Queue[Hello | Failed] = asyncio.Queue()
        self.session.greet(os.urandom(16), answers.put_nowait)
        try:
            await self._answer(answers, timeout_s)
        except EngineTimeoutError:
            raise no_hello(self.address, timeout_s) from None  # nothing is known to live there

    async def status(self, timeout_s: float) -> StatusReply:
        """Ask how the engine is."""
        answers: asyncio.Queue[StatusReply | Failed] = asyncio.Queue()
        self.session.ask_status(answers.put_nowait)
        return await self._answer(answers, timeout_s)

    async def reset_cache(self, timeout_s: float) -> int:
        """Have every cached prefix forgotten; return how many blocks that were."""
        answers: asyncio.Queue[CacheReset | Failed] = asyncio.Queue()
        self.session.ask_cache_reset(answers.put_nowait)
        return read_cache_reset(await self._answer(answers, timeout_s))

    async def abort(self, request_ids: list[int], timeout_s: float) -> None:
        """Abort requests and wait until the engine works on none of them."""
        if self._context.closed:
            raise closed()
        answers: asyncio.Queue[AbortAck | Failed] = asyncio.Queue()
        session = self.session
        expected = sum(session.abort(number, answers.put_nowait) for number in request_ids)
        for _ in range(expected):
            await self.next_event(answers, timeout_s)

    async def close(self) -> None:
        """Abort what still runs and close the socket."""
        if self._context.closed:
            return
        with contextlib.suppress(EngineError):
            await self.abort(self.session.live_request_ids, CLOSE_TIMEOUT_S)
        with contextlib.suppress(EngineError):
            self._session.leave()
        self._session.fail(closed())
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving
        self._watch.close()
        self._dealer.close(flush_s=FLUSH_S)
        self._context.destroy(linger=0)

    async def _answer(self, answers: "asyncio.Queue[Answer | Failed]", timeout_s: float) -> Answer:
        answer = await self.next_event(answers, timeout_s)
        if isinstance(answer, Failed):
            raise answer.error
        return answer

    # --------------------------------------------------------------------------
    # The task

    async def _serve(self) -> None:
        """Serve the connection until the session fails."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive())
                tasks.create_task(self._watch_peer())
                tasks.create_task(self._beat())
        except* EngineError as group:
            self._session.fail(_first(group))
        finally:
            self._session.fail(ClientUseError("This client has stopped."))

    async def _receive(self) -> None:
        num_frames = 0
        while self._session.failure is None:
            frame = await self._dealer.receive()
            self._pulse.heard(time.monotonic())
            self._session.receive(frame)
            num_frames += 1
            if num_frames % FRAMES_IN_A_ROW == 0:
                # Receiving what is already there gives nobody else a turn.
                await asyncio.sleep(0)

    async def _watch_peer(self) -> None:
        while True:
            await self._watch.left()
            if self._session.is_greeted:
                break
        await asyncio.sleep(LAST_WORDS_S)
        raise EngineGoneError(self.address, "has ended")

    async def _beat(self) -> None:
        while True:
            delay_s = self._pulse.beat(time.monotonic())
            if self._session.failure is not None:
                raise self._session.failure
            await asyncio.sleep(delay_s)


def _first(group: BaseExceptionGroup[EngineError]) -> EngineError:
    """Return one of the errors in a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, EngineError):
        raise error
    return error

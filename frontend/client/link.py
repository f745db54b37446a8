"""The blocking client's connection: one socket, one session, and the one place where it waits.

One thread at a time may use it, and another is refused. But a stream that its reader has dropped
may be finalized in any thread, in the middle of anything: it only leaves a note, and whoever holds
the link acts on it.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

import zmq

from frontend.client.errors import (
    ClientUseError,
    EngineGoneError,
    EngineTimeoutError,
    closed,
    no_hello,
    too_slow,
)
from frontend.client.pulse import Pulse
from frontend.client.results import read_cache_reset
from frontend.client.session import Failed, Session
from protocol.channels import Dealer, Inbox
from protocol.errors import EngineError
from protocol.lifecycle import Lifeline, ProcessConfig
from protocol.messages import AbortAck, CacheReset, Hello, StatusReply
from protocol.peer_watch import PeerWatch

Answer = TypeVar("Answer", Hello, StatusReply, CacheReset)

CLOSE_TIMEOUT_S = 1.0
"""How long closing waits until the engine has acknowledged the aborts of what still ran."""
FLUSH_S = 0.1
"""How long it then waits at most until the last message is out."""


class Link:
    """A session with one frontend, over a socket."""

    def __init__(self, address: str, *, window: int, silence_limit_s: float) -> None:
        """`address` as a socket takes it. Raises ConfigError if it takes it not."""
        self.address = address
        self._lock = threading.RLock()
        self._is_inside = False
        self._notes: deque[int] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._dealer = Dealer(self._context, address, bind=False)
        except EngineError:
            self._context.destroy(linger=0)
            raise
        self._watch = PeerWatch(self._dealer)
        by_hand = Lifeline(ProcessConfig(run_dir=""))  # no launcher whose end would be ours
        self._inbox = Inbox(by_hand, self._dealer, self._watch)
        self._session = Session(address, self._dealer.send, window=window)
        self._pulse = Pulse(self._session, silence_limit_s=silence_limit_s, now=time.monotonic())

    # --------------------------------------------------------------------------
    # One user at a time

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Keep other threads out. Raises ClientUseError if one is in."""
        if not self._lock.acquire(blocking=False):
            raise ClientUseError(
                "This client is in use by another thread; give each thread a client of its own."
            )
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        """Give the session to one piece of code that does not wait."""
        with self.reserved():
            was_inside, self._is_inside = self._is_inside, True
            try:
                yield self._session
                self._read_notes()
            finally:
                self._is_inside = was_inside

    def leave(self, request_id: int) -> None:
        """Abort a request, now or as soon as the link is free. For finalizers; never raises."""
        self._notes.append(request_id)
        with contextlib.suppress(EngineError), self.reserved():
            if not self._is_inside:
                with self.session():
                    pass  # it reads the notes when it is done

    def _read_notes(self) -> None:
        while self._notes:
            self._session.abort(self._notes.popleft())

    # --------------------------------------------------------------------------
    # Waiting

    def wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Serve the connection until something is so.

        Raises EngineTimeoutError after timeout_s seconds, and what the session fails of.
        """
        deadline = time.monotonic() + timeout_s
        with self.session() as session:
            if self._context.closed:
                raise closed()
            while True:
                self._receive()
                if is_done():
                    return
                if session.failure is not None:
                    raise session.failure
                self._read_notes()
                now = time.monotonic()
                if now >= deadline:
                    raise too_slow(self.address, timeout_s)
                self._inbox.wait(min(self._pulse.beat(now), deadline - now))

    def _receive(self) -> None:
        has_left = self._watch.has_left() and self._session.is_greeted
        frames = self._dealer.drain()
        while frames:
            self._pulse.heard(time.monotonic())
            for frame in frames:
                try:
                    self._session.receive(frame)
                except EngineError as error:
                    self._session.fail(error)
            # Who has left may have said a lot before: it counts.
            frames = self._dealer.drain() if has_left else []
        if has_left:
            self._session.fail(EngineGoneError(self.address, "has ended"))

    def _answer(self, answers: list[Answer | Failed], timeout_s: float) -> Answer:
        self.wait(lambda: bool(answers), timeout_s)
        answer = answers[0]
        if isinstance(answer, Failed):
            raise answer.error
        return answer

    # --------------------------------------------------------------------------
    # Questions with one answer

    def greet(self, timeout_s: float) -> None:
        """Say Hello and wait for the frontend's. Raises EngineGoneError."""
        answers: list[Hello | Failed] = []
        with self.session() as session:
            session.greet(os.urandom(16), answers.append)
        try:
            self._answer(answers, timeout_s)
        except EngineTimeoutError:
            raise no_hello(self.address, timeout_s) from None  # nothing is known to live there

    def status(self, timeout_s: float) -> StatusReply:
        """Ask how the engine is."""
        answers: list[StatusReply | Failed] = []
        with self.session() as session:
            session.ask_status(answers.append)
        return self._answer(answers, timeout_s)

    def reset_cache(self, timeout_s: float) -> int:
        """Have every cached prefix forgotten; return how many blocks that were."""
        answers: list[CacheReset | Failed] = []
        with self.session() as session:
            session.ask_cache_reset(answers.append)
        return read_cache_reset(self._answer(answers, timeout_s))

    def abort(self, request_ids: list[int], timeout_s: float) -> None:
        """Abort requests and wait until the engine works on none of them."""
        answers: list[AbortAck | Failed] = []
        with self.session() as session:
            expected = sum(session.abort(number, answers.append) for number in request_ids)
        self.wait(lambda: len(answers) >= expected, timeout_s)

    def close(self) -> None:
        """Abort what still runs and close the socket. Raises ClientUseError for other threads."""
        with self.reserved():
            if self._context.closed:
                return
            with contextlib.suppress(EngineError):
                self.abort(self._session.live_request_ids, CLOSE_TIMEOUT_S)
            with contextlib.suppress(EngineError):
                self._session.leave()
            self._session.fail(closed())
            self._watch.close()
            self._dealer.close(flush_s=FLUSH_S)
            self._context.destroy(linger=0)

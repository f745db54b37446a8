"""Asks the scheduler to forget every cached prefix, and who waits for its answer.

It answers in the order in which it was asked, so nothing names a question.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable

from protocol.errors import ErrorCode, ProcessError, RequestError
from protocol.messages import CacheReset, ResetCache

ANSWER_TIMEOUT_S = 5.0
"""How long the scheduler may take before whoever asked is told that it does not answer."""

log = logging.getLogger(__name__)


class CacheResets:
    """The resets of this frontend's that the scheduler has not answered."""

    def __init__(self, send: Callable[[ResetCache], None]) -> None:
        """`send` sends to the scheduler and raises ProcessError if it takes nothing."""
        self._send = send
        # One for each question under way; those that nobody waits for any more are done.
        self._waiting: deque[asyncio.Future[int]] = deque()

    async def ask(self) -> int:
        """Return how many blocks the scheduler has forgotten. Raises RequestError (NOT_READY)."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        # What it takes not now it asks for later: so the question stays among those under way.
        with contextlib.suppress(ProcessError):
            self._send(ResetCache())
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError as error:
            log.warning("the prefix cache's reset is not answered")
            raise RequestError(
                ErrorCode.NOT_READY,
                f"The scheduler has not answered within {ANSWER_TIMEOUT_S:g} s; the prefix cache "
                "may be reset later or not at all.",
            ) from error

    def take(self, answer: CacheReset) -> None:
        """Take in the answer to the oldest question."""
        if self._waiting and not (waiting := self._waiting.popleft()).done():
            waiting.set_result(answer.blocks_forgotten)

    def ask_again(self) -> None:
        """Ask a scheduler that has said Hello, and knows of no question, what is still open."""
        self._waiting = deque(each for each in self._waiting if not each.done())
        for _ in self._waiting:
            with contextlib.suppress(ProcessError):
                self._send(ResetCache())

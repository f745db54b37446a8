"""The connection to the scheduler: Hello first, and Hello again when it has forgotten us.

After each Hello of the scheduler's, whoever listens is told its facts, and gives it anew what it is
to work on. Until then what is sent goes nowhere: it is given again.
"""

import asyncio
import logging
import os
from typing import Protocol, assert_never

import zmq.asyncio

from protocol.channels import AsyncDealer
from protocol.connection import Codec, Connection
from protocol.errors import ProcessError, ProtocolError
from protocol.messages import (
    Abort,
    AbortAck,
    AddSequence,
    CacheReset,
    Drain,
    EngineFacts,
    Hello,
    Ping,
    QueuePositions,
    Resend,
    Reset,
    ResetCache,
    Role,
    SchedulerToFrontend,
    TokenDeltas,
)
from protocol.recording import Recorder

MESSAGES_A_TURN = 8
"""Most messages taken before the rest of the process has its turn."""

log = logging.getLogger(__name__)


class SchedulerListener(Protocol):
    """Who is told what the scheduler says."""

    def meet_scheduler(self, facts: EngineFacts) -> None:
        """It has said Hello, and knows of no request."""
        ...

    def take_deltas(self, deltas: TokenDeltas) -> None:
        """Sequences have new tokens or an end."""
        ...

    def take_ack(self, ack: AbortAck) -> None:
        """An abort has taken effect."""
        ...

    def take_cache_reset(self, answer: CacheReset) -> None:
        """The prefix cache has been reset."""
        ...

    def take_ping(self, ping: Ping) -> None:
        """How long its waiting queue is."""
        ...

    def take_positions(self, positions: QueuePositions) -> None:
        """Where requests are in that queue."""
        ...

    def start_draining(self, deadline: float) -> None:
        """It takes nothing new; `deadline` in seconds on the monotonic clock."""
        ...


class SchedulerLink:
    """This frontend's connection to the scheduler."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        *,
        epoch: int,
        recorder: Recorder | None = None,
    ) -> None:
        """`epoch`: of the engine, 0 if the scheduler knows it alone."""
        self._hello = Hello(role=Role.FRONTEND, identity=os.urandom(16), epoch=epoch)
        self._channel = AsyncDealer(context, address, bind=False, recorder=recorder)
        self._codec: Codec[SchedulerToFrontend] = Codec(SchedulerToFrontend)
        self._connection = self._connect()
        self._refused: ProcessError | None = None

    def send(self, message: AddSequence | Abort | ResetCache) -> None:
        """Send, if the scheduler has said Hello. Raises ProcessError if it takes no messages."""
        if self._connection.peer is not None:
            self._refused = None
            self._connection.send(message)
            if self._refused is not None:
                raise self._refused

    def ping(self) -> None:
        """Let the scheduler notice a lost last message."""
        if self._connection.peer is not None:
            self._connection.send(Ping())

    async def run(self, listener: SchedulerListener) -> None:
        """Pass on what the scheduler says; never returns.

        Raises ProtocolError if it speaks another version or out of turn.
        """
        log.info("waits for the scheduler address=%s", self._channel.address)
        self._connection.hello(self._hello)
        taken = 0
        while True:
            message = self._connection.receive(await self._channel.receive())
            match message:
                case TokenDeltas():
                    listener.take_deltas(message)
                case AbortAck():
                    listener.take_ack(message)
                case CacheReset():
                    listener.take_cache_reset(message)
                case QueuePositions():
                    listener.take_positions(message)
                case Hello():
                    self._connection.adopt_epoch(message.epoch)
                    listener.meet_scheduler(_facts(message))
                case Ping():
                    listener.take_ping(message)
                case Drain():
                    listener.start_draining(message.deadline)
                case Reset():
                    log.warning("the scheduler has forgotten this frontend")
                    self._connection = self._connect()
                    self._connection.hello(self._hello)
                case None | Resend():
                    pass  # the connection has done what there is to do
                case _:
                    assert_never(message)
            # Messages that are there already are taken without a pause, which lets their tokens be
            # merged before anybody sends them on; but not without end.
            taken += 1
            if taken % MESSAGES_A_TURN == 0:
                await asyncio.sleep(0)

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def _connect(self) -> Connection[SchedulerToFrontend]:
        return Connection(self._send_frame, self._codec)

    def _send_frame(self, frame: bytes) -> None:
        try:
            self._channel.send(frame)
        except ProcessError as error:
            # A scheduler that is paused takes nothing. What gets lost is asked for later.
            self._refused = error


def _facts(hello: Hello) -> EngineFacts:
    if hello.role is not Role.SCHEDULER or hello.facts is None:
        raise ProtocolError(
            f"A {hello.role.name.lower()} without facts answers where the scheduler should."
        )
    return hello.facts

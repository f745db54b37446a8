"""The link to the scheduler, against a bare ROUTER."""

import asyncio

import pytest
import zmq.asyncio

from frontend.scheduler_link import SchedulerLink
from protocol.channels import AsyncRouter
from protocol.columns import pack_int32
from protocol.connection import Codec, Connection, Outgoing
from protocol.errors import ProcessError, ProtocolError
from protocol.messages import (
    Abort,
    AbortAck,
    AbortState,
    AddSequence,
    CacheReset,
    Drain,
    FrontendToScheduler,
    Hello,
    Ping,
    QueuePositions,
    Resend,
    Reset,
    Role,
    SamplingParams,
)
from tests.frontend.conftest import FACTS, make_deltas, until

SEQUENCE = AddSequence(request_id=1, sample=0, prompt_ids=pack_int32([1]), params=SamplingParams())


class Listener:
    def __init__(self):
        self.heard = []

    def meet_scheduler(self, facts):
        self.heard.append(facts)

    def take_deltas(self, deltas):
        self.heard.append(deltas)

    def take_ack(self, ack):
        self.heard.append(ack)

    def take_cache_reset(self, answer):
        self.heard.append(answer)

    def take_ping(self, ping):
        self.heard.append(ping)

    def take_positions(self, positions):
        self.heard.append(positions)

    def start_draining(self, deadline):
        self.heard.append(deadline)


class Scheduler:
    """The other end, by hand."""

    def __init__(self, router):
        self._router = router
        self.connection = None

    async def meet(self, epoch=3, **fields):
        source, frame = await self._router.receive()
        self.connection = Connection(
            lambda out: self._router.send(source, out), Codec(FrontendToScheduler), Outgoing(epoch)
        )
        hello = self.connection.receive(frame)
        fields = {"role": Role.SCHEDULER, "facts": FACTS, "epoch": epoch} | fields
        self.connection.hello(Hello(identity=b"s", **fields))
        return hello

    async def receive(self):
        while (message := self.connection.receive((await self._router.receive())[1])) is None:
            pass
        return message


def with_link(tmp_path, use, *, epoch=0):
    async def main():
        context = zmq.asyncio.Context()
        address = f"ipc://{tmp_path}/scheduler"
        link = SchedulerLink(context, address, epoch=epoch)
        listener = Listener()
        running = asyncio.create_task(link.run(listener))
        await asyncio.sleep(0.01)  # the frontend may well be there first
        router = AsyncRouter(context, address)
        try:
            async with asyncio.timeout(10):
                return await use(link, Scheduler(router), listener, running)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            link.close()
            router.close()
            context.destroy(linger=0)

    return asyncio.run(main())


@pytest.mark.parametrize("epoch", [0, 3])
def test_hello_both_ways_then_messages(tmp_path, epoch):
    async def use(link, scheduler, listener, running):
        hello = await scheduler.meet()
        await until(lambda: listener.heard)
        link.send(SEQUENCE)
        link.send(Abort(request_id=1))
        link.ping()
        got = [await scheduler.receive() for _ in range(3)]
        return hello, got, listener.heard

    hello, got, heard = with_link(tmp_path, use, epoch=epoch)
    assert (hello.role, hello.epoch) == (Role.FRONTEND, epoch)
    assert heard == [FACTS]
    assert [type(message) for message in got] == [AddSequence, Abort, Ping]
    assert [(message.epoch, message.seq) for message in got] == [(3, 1), (3, 2), (3, 2)]


def test_what_the_scheduler_says_is_passed_on(tmp_path):
    async def use(link, scheduler, listener, running):
        await scheduler.meet()
        scheduler.connection.send(make_deltas(SEQUENCE, [5], first=0))
        scheduler.connection.send(
            AbortAck(request_id=1, sample=-1, state=AbortState.LIVE, blocks_returned=2)
        )
        scheduler.connection.send(Ping(waiting_requests=4))
        scheduler.connection.send(QueuePositions(requests=b"", positions=b""))
        scheduler.connection.send(Drain(deadline=12.5))
        scheduler.connection.send(CacheReset(blocks_forgotten=3))
        await until(lambda: len(listener.heard) == 7)
        return listener.heard

    _, deltas, ack, ping, positions, deadline, reset = with_link(tmp_path, use)
    assert reset.blocks_forgotten == 3
    assert (deltas.seq, ack.seq, ping.waiting_requests, deadline) == (1, 2, 4, 12.5)
    assert (type(positions), positions.seq) == (QueuePositions, 3)


def test_a_scheduler_that_has_forgotten_us_gets_hello_again(tmp_path):
    async def use(link, scheduler, listener, running):
        await scheduler.meet(epoch=3)
        await until(lambda: listener.heard)
        link.send(SEQUENCE)
        await scheduler.receive()
        scheduler.connection.send(Reset())
        await asyncio.sleep(0.02)
        link.send(SEQUENCE)  # goes nowhere: it is given again after Hello
        await scheduler.meet(epoch=4)
        await until(lambda: len(listener.heard) == 2)
        link.send(SEQUENCE)
        return await scheduler.receive()

    message = with_link(tmp_path, use)
    assert (message.epoch, message.seq) == (4, 1)


def test_nothing_is_sent_before_hello(tmp_path):
    async def use(link, scheduler, listener, running):
        link.send(SEQUENCE)
        link.ping()
        await scheduler.meet()
        await until(lambda: listener.heard)
        link.send(Abort(request_id=9))
        return await scheduler.receive()

    assert isinstance(with_link(tmp_path, use), Abort)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"protocol_version": 99}, "speaks protocol version 99"),
        ({"facts": None}, "A scheduler without facts"),
        ({"role": Role.WORKER}, "A worker without facts"),
    ],
)
def test_a_peer_that_is_no_scheduler_of_ours_ends_the_frontend(tmp_path, fields, sentence):
    async def use(link, scheduler, listener, running):
        await scheduler.meet(**fields)
        with pytest.raises(ProtocolError, match=sentence):
            await running

    with_link(tmp_path, use)


def test_a_scheduler_that_takes_nothing_fails_requests_and_nothing_else(tmp_path, monkeypatch):
    async def use(link, scheduler, listener, running):
        await scheduler.meet()
        await until(lambda: listener.heard)

        def takes_nothing(frame):
            raise ProcessError("The process takes no messages.")

        with monkeypatch.context() as paused:
            paused.setattr(link._channel, "send", takes_nothing)
            link.ping()
            scheduler.connection.send(Resend(from_seq=1))
            with pytest.raises(ProcessError, match="takes no messages"):
                link.send(SEQUENCE)
            await asyncio.sleep(0.05)
        assert not running.done()
        # What was lost is asked for once the scheduler sees a later message.
        link.ping()
        return [await scheduler.receive() for _ in range(2)]

    messages = with_link(tmp_path, use)
    assert [(type(message), message.seq) for message in messages] == [(Ping, 1), (AddSequence, 1)]

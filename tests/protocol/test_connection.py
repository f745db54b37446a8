"""Numbered delivery between two connections joined by a wire that a test controls."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import connection
from protocol.connection import Codec, Connection, Outgoing
from protocol.errors import BadFrameError, ProtocolError
from protocol.messages import (
    Abort,
    FrontendToScheduler,
    Hello,
    Ping,
    Resend,
    Reset,
    Role,
    SchedulerToFrontend,
    StepPlan,
)

HELLO = Hello(role=Role.FRONTEND, identity=b"f")


class Wire:
    """Two ends, and the frames on their way in each direction."""

    def __init__(self):
        self.there: list[bytes] = []
        self.back: list[bytes] = []
        self.sender = Connection(self.there.append, Codec(SchedulerToFrontend))
        self.receiver = Connection(self.back.append, Codec(FrontendToScheduler))
        self.sender.adopt_epoch(1)
        self.receiver.adopt_epoch(1)
        self.sender.hello(HELLO)
        self.receiver.hello(Hello(role=Role.SCHEDULER, identity=b"s", epoch=1))
        assert self.deliver() == [HELLO]

    def deliver(self):
        """Deliver everything on its way, answers included; return what the receiver got."""
        got = []
        while self.there or self.back:
            while self.there:
                message = self.receiver.receive(self.there.pop(0))
                got += [message] if message is not None else []
            while self.back:
                self.sender.receive(self.back.pop(0))
        return got


def ids(messages):
    return [message.request_id for message in messages if isinstance(message, Abort)]


def test_what_a_bad_frame_holds_can_forge_no_line():
    frame = msgspec.msgpack.encode(["x" * 1000 + "\n12:00:00 I scheduler forged"])
    with pytest.raises(BadFrameError) as caught:
        Codec(FrontendToScheduler).decode(frame)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
    with pytest.raises(BadFrameError, match=r"Invalid value 'a\\nb'"):
        Codec(FrontendToScheduler).decode(msgspec.msgpack.encode(["a\nb"]))


def test_messages_arrive_numbered_and_in_order():
    wire = Wire()
    for request_id in (4, 5):
        wire.sender.send(Abort(request_id=request_id))
    got = wire.deliver()
    assert [(a.epoch, a.seq, a.request_id) for a in got] == [(1, 1, 4), (1, 2, 5)]


def test_a_repeated_frame_is_dropped():
    wire = Wire()
    wire.sender.send(Abort(request_id=4))
    wire.there *= 3
    assert ids(wire.deliver()) == [4]
    assert wire.receiver.dropped == 2


def test_a_lost_frame_is_asked_for_again():
    wire = Wire()
    for request_id in (4, 5, 6):
        wire.sender.send(Abort(request_id=request_id))
    del wire.there[0]
    assert ids(wire.deliver()) == [4, 5, 6]


def test_a_lost_last_frame_is_found_by_the_next_ping():
    wire = Wire()
    wire.sender.send(Abort(request_id=4))
    wire.there.clear()
    wire.sender.send(Ping())
    got = wire.deliver()
    assert ids(got) == [4]
    assert Ping(epoch=1, seq=1) in got


def test_control_messages_are_not_counted():
    wire = Wire()
    wire.sender.send(Abort(request_id=4))
    wire.sender.send(Ping())
    wire.sender.send(Abort(request_id=5))
    assert [message.seq for message in wire.deliver()] == [1, 1, 2]


def test_another_epoch_is_dropped():
    wire = Wire()
    wire.sender.adopt_epoch(2)
    wire.sender.send(Abort(request_id=4))
    assert wire.deliver() == []
    assert wire.receiver.dropped == 1


def test_a_frame_no_longer_kept_resets_the_connection(monkeypatch):
    monkeypatch.setattr(connection, "KEPT_FRAMES", 2)
    wire = Wire()
    for request_id in range(5):
        wire.sender.send(Abort(request_id=request_id))
    del wire.there[0]
    assert Reset(epoch=1, seq=5) in wire.deliver()


def test_kept_frames_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(connection, "KEPT_BYTES", 100)
    outgoing = Outgoing(epoch=1)
    for request_id in range(20):
        outgoing.frame(Abort(request_id=request_id))
    kept = outgoing.kept_since(19)
    assert kept is not None
    assert len(kept) == 2
    assert outgoing.kept_since(1) is None
    assert outgoing.kept_since(21) == []


def test_ranks_that_share_an_outgoing_get_the_same_frame():
    outgoing = Outgoing(epoch=1)
    sent: list[list[bytes]] = [[], []]
    ranks = [Connection(frames.append, Codec(FrontendToScheduler), outgoing) for frames in sent]
    frame = outgoing.frame(StepPlan(step_id=1))
    for rank in ranks:
        rank.send_frame(frame)
    assert sent[0] == sent[1] == [frame]


def test_the_first_message_is_hello():
    receiver = Connection(lambda _: None, Codec(FrontendToScheduler))
    frame = msgspec.msgpack.encode(Abort(epoch=0, seq=1, request_id=4))
    with pytest.raises(ProtocolError, match="first message of a connection is Hello, not Abort"):
        receiver.receive(frame)


def test_another_protocol_version_is_refused_with_both():
    receiver = Connection(lambda _: None, Codec(FrontendToScheduler))
    hello = msgspec.structs.replace(HELLO, protocol_version=99)
    with pytest.raises(ProtocolError, match="frontend speaks protocol version 99, this process 4"):
        receiver.receive(msgspec.msgpack.encode(hello))


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\x93\xa4Ping", b"\x91" * 100_000, b"\x91\xa1\xff"]
)
def test_bytes_that_are_no_message_raise_one_error(frame):
    receiver = Connection(lambda _: None, Codec(FrontendToScheduler))
    with pytest.raises(BadFrameError, match="is no message"):
        receiver.receive(frame)


def test_hello_again_starts_the_connection_anew():
    wire = Wire()
    wire.sender.send(Abort(request_id=4))
    wire.deliver()
    fresh = Connection(wire.there.append, Codec(SchedulerToFrontend))
    fresh.adopt_epoch(1)
    fresh.hello(HELLO)
    fresh.send(Abort(request_id=7))
    assert ids(wire.deliver()) == [7]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["send", "lose", "repeat", "swap", "deliver"]), max_size=40))
def test_any_loss_repetition_and_order_delivers_each_message_once_in_order(actions):
    wire = Wire()
    sent, got = 0, []
    for action in actions:
        if action == "send":
            wire.sender.send(Abort(request_id=sent))
            sent += 1
        elif action == "deliver":
            got += ids(wire.deliver())
        elif action == "lose":
            del wire.there[:1]
        elif action == "repeat":
            wire.there += wire.there[:1]
        else:
            wire.there[:2] = wire.there[1::-1]
    wire.sender.send(Ping())
    got += ids(wire.deliver())
    assert got == list(range(sent))


def test_resend_is_asked_once_per_gap():
    asked: list[bytes] = []
    receiver = Connection(asked.append, Codec(FrontendToScheduler))
    receiver.adopt_epoch(1)
    receiver.receive(msgspec.msgpack.encode(HELLO))
    for seq in (3, 4, 5):
        receiver.receive(msgspec.msgpack.encode(Abort(epoch=1, seq=seq, request_id=1)))
    assert [msgspec.msgpack.decode(frame, type=Resend).from_seq for frame in asked] == [1]

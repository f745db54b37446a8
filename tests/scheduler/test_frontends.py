from collections import deque

import msgspec

from protocol.connection import Codec, Connection
from protocol.messages import (
    Abort,
    AbortAck,
    AbortState,
    Hello,
    Ping,
    QueuePositions,
    Reset,
    Role,
    SchedulerToFrontend,
)
from scheduler.frontends import PING_INTERVAL_S, PING_LATEST_S, PING_ROOM_S, Frontends, Left
from tests.scheduler.simulation import add_message

ACK = AbortAck(request_id=1, sample=0, state=AbortState.LIVE, blocks_returned=0)
HELLO = Hello(role=Role.SCHEDULER, identity=b"scheduler", epoch=5)


class WireRouter:
    """A router's two ends in memory; identities in `gone` cannot be reached."""

    def __init__(self):
        self.inbound = deque()
        self.outbound = {}
        self.gone = set()

    def drain(self):
        frames = list(self.inbound)
        self.inbound.clear()
        return frames

    def send(self, identity, frame):
        if identity in self.gone:
            return False
        self.outbound.setdefault(identity, deque()).append(frame)
        return True


class Peer:
    """A frontend on that wire."""

    def __init__(self, router, identity):
        self._router = router
        self._identity = identity
        self.connect()

    def connect(self):
        self.connection = Connection(
            lambda frame: self._router.inbound.append((self._identity, frame)),
            Codec(SchedulerToFrontend),
        )
        self.connection.adopt_epoch(5)

    def hello(self, **changes):
        hello = Hello(role=Role.FRONTEND, identity=self._identity)
        self.connection.hello(msgspec.structs.replace(hello, **changes))

    def heard(self):
        frames = self._router.outbound.pop(self._identity, ())
        return [self.connection.receive(frame) for frame in frames]


def engine():
    router = WireRouter()
    return router, Frontends(router, HELLO)


def connected(router, frontends, identity=b"f"):
    peer = Peer(router, identity)
    peer.hello()
    assert frontends.receive() == []
    assert peer.heard() == [HELLO]
    return peer


def kinds(messages):
    return [type(message) for message in messages]


def test_what_frontends_ask_for_comes_in_order_with_their_identity():
    router, frontends = engine()
    first, second = connected(router, frontends, b"a"), connected(router, frontends, b"b")
    first.connection.send(add_message(1, [1]))
    second.connection.send(add_message(1, [2]))
    first.connection.send(Abort(request_id=1))
    events = frontends.receive()
    assert [source for source, _ in events] == [b"a", b"b", b"a"]
    assert kinds(event for _, event in events) == [type(add_message(1, [1]))] * 2 + [Abort]
    assert frontends.receive() == []


def test_what_is_sent_reaches_the_one_it_is_for():
    router, frontends = engine()
    first, second = connected(router, frontends, b"a"), connected(router, frontends, b"b")
    frontends.send(b"a", ACK)
    frontends.send(b"nobody", ACK)
    assert kinds(first.heard()) == [AbortAck]
    assert second.heard() == []


def test_a_second_hello_ends_the_first_connection_in_the_order_of_events():
    router, frontends = engine()
    peer = connected(router, frontends)
    peer.connection.send(add_message(1, [1]))
    peer.connect()
    peer.hello()
    peer.connection.send(add_message(2, [1]))
    events = [event for _, event in frontends.receive()]
    assert [getattr(event, "request_id", event) for event in events] == [
        1,
        Left("says Hello again"),
        2,
    ]
    frontends.send(b"f", ACK)
    assert kinds(peer.heard()) == [Hello, AbortAck]


def test_a_frontend_that_cannot_be_reached_has_left():
    router, frontends = engine()
    connected(router, frontends)
    router.gone.add(b"f")
    frontends.send(b"f", ACK)
    frontends.send(b"f", ACK)
    assert frontends.receive() == [(b"f", Left("is gone or does not read"))]


def test_a_frontend_that_resets_has_left():
    router, frontends = engine()
    peer = connected(router, frontends)
    peer.connection.send(Reset())
    assert frontends.receive() == [(b"f", Left("forgets the connection"))]


def test_bytes_that_are_no_message_end_that_connection_only():
    router, frontends = engine()
    good, bad = connected(router, frontends, b"good"), connected(router, frontends, b"bad")
    router.inbound.append((b"bad", b"\xc1"))
    good.connection.send(Abort(request_id=1))
    assert frontends.receive() == [
        (b"bad", Left("breaks the protocol")),
        (b"good", Abort(epoch=5, seq=1, request_id=1)),
    ]
    assert kinds(bad.heard()) == [Hello, Reset]
    assert good.heard() == []


def test_a_stranger_is_told_to_say_hello_once():
    router, frontends = engine()
    stranger = Peer(router, b"s")
    for request_id in range(3):
        stranger.connection.send(Abort(request_id=request_id))
    assert frontends.receive() == []
    assert kinds(stranger.heard()) == [Hello, Reset]
    stranger.connect()
    stranger.hello()
    stranger.connection.send(Abort(request_id=7))
    assert [event.request_id for _, event in frontends.receive()] == [7]
    assert kinds(stranger.heard()) == [Hello]
    router.inbound.append((b"s", b"\xc1"))
    assert frontends.receive() == [(b"s", Left("breaks the protocol"))]
    assert kinds(stranger.heard()) == [Hello, Reset]


def test_another_version_is_told_ours_and_another_role_nothing():
    router, frontends = engine()
    old, odd = Peer(router, b"old"), Peer(router, b"odd")
    old.hello(protocol_version=0)
    odd.hello(role=Role.CLIENT)
    assert frontends.receive() == []
    assert kinds(old.heard()) == [Hello, Reset]
    assert odd.heard() == []


def tell(frontends, now, waiting_requests, waiting_tokens):
    """Do what the main loop does each time it comes round."""
    if frontends.is_ping_due(now, waiting_requests, waiting_tokens):
        ping = Ping(waiting_requests=waiting_requests, waiting_tokens=waiting_tokens)
        frontends.ping(now, ping)


def test_pings_tell_the_queue_when_it_changes_at_a_modest_rate():
    router, frontends = engine()
    peer = connected(router, frontends)
    tell(frontends, 100.0, 0, 0)
    assert kinds(peer.heard()) == [Ping]
    tell(frontends, 100.0 + PING_LATEST_S / 2, 0, 0)
    assert peer.heard() == []
    tell(frontends, 100.0 + PING_LATEST_S, 0, 0)
    assert kinds(peer.heard()) == [Ping]
    tell(frontends, 300.0, 3, 50)
    tell(frontends, 300.0 + PING_INTERVAL_S / 2, 4, 60)
    (ping,) = peer.heard()
    assert (ping.waiting_requests, ping.waiting_tokens) == (3, 50)
    tell(frontends, 300.0 + PING_INTERVAL_S, 4, 60)
    (ping,) = peer.heard()
    assert (ping.waiting_requests, ping.waiting_tokens) == (4, 60)


def test_room_in_a_queue_that_was_full_is_told_soon():
    router, frontends = engine()
    peer = connected(router, frontends)
    limits = {"max_waiting_requests": 3, "max_waiting_tokens": 50}
    frontends.ping(300.0, Ping(waiting_requests=2, waiting_tokens=10, **limits))
    soon = 300.001 + PING_ROOM_S
    assert not frontends.is_ping_due(soon, 3, 11)
    frontends.ping(300.0, Ping(waiting_requests=3, waiting_tokens=10, **limits))
    assert not frontends.is_ping_due(soon - 0.002, 2, 9)
    assert not frontends.is_ping_due(soon, 2, 50)
    assert frontends.is_ping_due(soon, 2, 9)
    frontends.ping(300.0, Ping(waiting_requests=1, waiting_tokens=50, **limits))
    assert frontends.is_ping_due(soon, 1, 49)
    assert kinds(peer.heard()) == [Ping] * 3


def test_a_ping_follows_news_so_that_a_lost_last_message_is_noticed():
    router, frontends = engine()
    peer = connected(router, frontends)
    tell(frontends, 100.0, 0, 0)
    peer.heard()
    frontends.send(b"f", ACK)
    router.outbound.clear()
    tell(frontends, 101.0, 0, 0)
    assert kinds(peer.heard()) == [Ping]
    frontends.receive()
    assert kinds(peer.heard()) == [AbortAck]


def test_one_that_could_not_be_told_to_say_hello_is_told_again():
    router, frontends = engine()
    peer = connected(router, frontends)
    router.gone.add(b"f")
    frontends.send(b"f", ACK)
    peer.connection.send(Ping())
    # It reads nothing: neither that it has left nor that it should say Hello.
    assert [event for _, event in frontends.receive()] == [Left("is gone or does not read")]
    router.gone.clear()
    assert peer.heard() == []
    peer.connection.send(Ping())
    assert frontends.receive() == []
    assert kinds(peer.heard()) == [Hello, Reset]


def test_positions_go_out_without_asking_for_a_ping_of_their_own():
    router, frontends = engine()
    peer = connected(router, frontends)
    tell(frontends, 100.0, 0, 0)
    peer.heard()
    frontends.send_positions(b"f", QueuePositions(requests=b"", positions=b""))
    frontends.send_positions(b"nobody", QueuePositions(requests=b"", positions=b""))
    assert kinds(peer.heard()) == [QueuePositions]
    assert not frontends.is_ping_due(100.0 + PING_INTERVAL_S, 0, 0)

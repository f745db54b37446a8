"""Real sockets in a real directory."""

import asyncio
import os
import socket

import pytest
import zmq
import zmq.asyncio

from protocol.channels import PARTS_A_TURN, AsyncDealer, AsyncRouter, Dealer, Inbox, Router
from protocol.errors import ConfigError, LauncherGoneError
from protocol.lifecycle import Lifeline, ProcessConfig
from protocol.recording import Recorder, read_recording


class Sockets:
    """Makes channels in one context and closes them all."""

    def __init__(self):
        self.context = zmq.Context()
        self.made = []

    def dealer(self, address, **settings):
        self.made.append(Dealer(self.context, address, **settings))
        return self.made[-1]

    def router(self, address):
        self.made.append(Router(self.context, address))
        return self.made[-1]


@pytest.fixture
def sockets():
    sockets = Sockets()
    yield sockets
    for channel in sockets.made:
        channel.close()
    sockets.context.destroy(linger=0)


@pytest.fixture
def address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a short relative path: pytest's own are near the limit
    return "ipc://socket"


def no_lifeline():
    return Lifeline(ProcessConfig(run_dir=""))


def drain(channel, count):
    """Return the next `count` frames, waiting at most ten seconds."""
    inbox, frames = Inbox(no_lifeline(), channel), []
    for _ in range(100):
        inbox.wait(0.1)
        frames += channel.drain()
        if len(frames) >= count:
            return frames
    raise AssertionError(f"only {len(frames)} of {count} frames came")


def test_dealers_pass_frames_in_order_whoever_starts_first(sockets, address):
    early = sockets.dealer(address, bind=False)
    for frame in (b"a", b"b"):
        early.send(frame)
    late = sockets.dealer(address, bind=True)
    assert drain(late, 2) == [b"a", b"b"]
    late.send(b"c")
    assert drain(early, 1) == [b"c"]


def test_a_router_knows_its_peers_apart(sockets, address):
    router = sockets.router(address)
    dealers = []
    for name in (b"one", b"two"):
        dealer = sockets.dealer(address, bind=False)
        dealer.send(name)
        dealers.append(dealer)
    identities = {frame: identity for identity, frame in drain(router, 2)}
    assert router.send(identities[b"two"], b"for two")
    assert drain(dealers[1], 1) == [b"for two"]
    assert dealers[0].drain() == []


def test_a_router_says_that_a_peer_is_gone(sockets, address):
    router = sockets.router(address)
    assert router.send(b"nobody", b"x") is False


def test_messages_of_several_frames_are_not_ours(sockets, address):
    receiver = sockets.dealer(address, bind=True)
    sender = sockets.dealer(address, bind=False)
    sender.socket.send_multipart([b"x", b"y", b"z"])
    sender.send(b"ours")
    assert drain(receiver, 1) == [b"ours"]


def test_an_address_in_use_or_without_directory_is_a_sentence(sockets, address):
    with pytest.raises(ConfigError, match=r"Cannot listen on ipc://nowhere/socket: "):
        sockets.dealer("ipc://nowhere/socket", bind=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            sockets.dealer(f"tcp://127.0.0.1:{port}", bind=True)
    assert str(caught.value) == (
        f"Cannot listen on tcp://127.0.0.1:{port}: Address already in use."
    )


def test_waiting_ends_with_the_launcher():
    read, write = os.pipe()
    inbox = Inbox(Lifeline(ProcessConfig(run_dir="", lifeline_fd=read)))
    inbox.wait(0.01)
    os.close(write)
    with pytest.raises(LauncherGoneError):
        inbox.wait(10)
    os.close(read)


def test_every_frame_is_recorded(sockets, address, tmp_path):
    tap = Recorder(str(tmp_path), "p")
    receiver = sockets.dealer(address, bind=True, recorder=tap)
    sender = sockets.dealer(address, bind=False)
    sender.send(b"\x01")
    drain(receiver, 1)
    receiver.send(b"\x02")
    entries = [(e.direction, e.frame) for e in read_recording(tmp_path / "p.tap")]
    assert entries == [("in", b"\x01"), ("out", b"\x02")]
    tap.close()


def test_asyncio_twins_talk_to_each_other(address):
    async def talk():
        context = zmq.asyncio.Context()
        router = AsyncRouter(context, address)
        dealer = AsyncDealer(context, address, bind=False)
        dealer.send(b"hello")
        identity, frame = await asyncio.wait_for(router.receive(), 10)
        for _ in range(3):
            assert router.send(identity, frame + b"!")
        answers = [await asyncio.wait_for(dealer.receive(), 10) for _ in range(3)]
        gone = router.send(b"nobody", b"x"), router.reaches(b"nobody", b"x")
        dealer.close()
        router.close()
        context.destroy(linger=0)
        return answers, gone

    assert asyncio.run(talk()) == ([b"hello!"] * 3, (False, False))


def test_a_message_of_many_frames_is_dropped_and_gives_others_their_turn(address):
    async def talk():
        context = zmq.asyncio.Context()
        router = AsyncRouter(context, address)
        dealer = AsyncDealer(context, address, bind=False)
        receiving = asyncio.create_task(router.receive())
        await dealer.socket.send_multipart([b"part"] * 5 * PARTS_A_TURN)
        await dealer.socket.send_multipart([b"x", b"y"])
        dealer.send(b"ours")
        turns = 0
        while not receiving.done():
            await asyncio.sleep(0)
            turns += 1
        dealer.close()
        router.close()
        context.destroy(linger=0)
        return receiving.result()[1], turns

    frame, turns = asyncio.run(asyncio.wait_for(talk(), 10))
    assert frame == b"ours"
    assert turns >= 4


def test_a_peer_that_does_not_read_is_still_reached(address, monkeypatch):
    monkeypatch.setattr("protocol.channels.HIGH_WATER_MARK", 1)

    async def talk():
        context = zmq.asyncio.Context()
        router = AsyncRouter(context, address)
        dealer = AsyncDealer(context, address, bind=False)
        dealer.send(b"hello")
        identity, _ = await asyncio.wait_for(router.receive(), 10)
        has_room = True
        while has_room:
            has_room = router.send(identity, bytes(100_000))
            await asyncio.sleep(0)
        reached = router.reaches(identity, b"x")
        dealer.close()
        router.close()
        context.destroy(linger=0)
        return reached

    assert asyncio.run(talk())


def test_what_is_sent_before_closing_arrives_if_it_may(sockets, address):
    receiver = sockets.router(address)
    context = zmq.Context()
    sender = Dealer(context, address, bind=False)
    sender.send(b"last words")
    sender.close(flush_s=10.0)
    context.destroy(linger=0)
    assert [frame for _, frame in drain(receiver, 1)] == [b"last words"]

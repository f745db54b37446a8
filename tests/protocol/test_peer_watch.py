"""A peer that goes is noticed; one that has not come or only waits is not."""

import asyncio
import time

import pytest
import zmq
import zmq.asyncio

from protocol.channels import AsyncDealer, Dealer, Inbox, Router
from protocol.lifecycle import Lifeline, ProcessConfig
from protocol.peer_watch import AsyncPeerWatch, PeerWatch


class Peer:
    """A router in a context of its own, as another process has."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.router = Router(self.context, address)
        self.address = self.router.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def meet(self):
        """Wait for a frame and answer it."""
        inbox = Inbox(Lifeline(ProcessConfig(run_dir="")), self.router)
        inbox.wait(10)
        ((identity, frame),) = self.router.drain()
        assert self.router.send(identity, frame)

    def leave(self):
        self.router.close()
        self.context.destroy(linger=0)


@pytest.fixture(params=["ipc", "tcp"])
def peer(request, tmp_path_factory):
    where = f"ipc://{tmp_path_factory.mktemp('p')}/s" if request.param == "ipc" else None
    peer = Peer(where or "tcp://127.0.0.1:*")
    yield peer
    peer.leave()


def test_a_peer_that_leaves_is_noticed_after_its_last_words(peer):
    context = zmq.Context()
    dealer = Dealer(context, peer.address, bind=False)
    watch = PeerWatch(dealer)
    inbox = Inbox(Lifeline(ProcessConfig(run_dir="")), dealer, watch)
    dealer.send(b"hello")
    peer.meet()
    inbox.wait(10)
    assert not watch.has_left()
    time.sleep(0.05)  # what it has said is here before it goes
    peer.leave()
    deadline = time.monotonic() + 10
    while not watch.has_left():
        assert time.monotonic() < deadline
        inbox.wait(0.01)
    assert dealer.drain() == [b"hello"]
    assert not watch.has_left()
    watch.close()
    dealer.close()
    context.destroy(linger=0)


def test_a_peer_that_never_came_has_not_left(tmp_path_factory):
    context = zmq.Context()
    dealer = Dealer(context, f"ipc://{tmp_path_factory.mktemp('p')}/s", bind=False)
    watch = PeerWatch(dealer)
    time.sleep(0.2)
    assert not watch.has_left()
    watch.close()
    dealer.close()
    context.destroy(linger=0)


def test_the_asyncio_watch_wakes_when_the_peer_leaves(peer):
    async def main():
        context = zmq.asyncio.Context()
        dealer = AsyncDealer(context, peer.address, bind=False)
        watch = AsyncPeerWatch(dealer)
        left = asyncio.create_task(watch.left())
        dealer.send(b"hello")
        await asyncio.to_thread(peer.meet)
        assert await dealer.receive() == b"hello"
        assert not left.done()
        peer.leave()
        async with asyncio.timeout(10):
            await left
        watch.close()
        dealer.close()
        context.destroy(linger=0)

    asyncio.run(main())

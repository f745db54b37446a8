"""The blocking client against a scripted endpoint, over real sockets."""

import threading
import time

import msgspec
import pytest
import zmq

from frontend.client.client import Client
from frontend.client.errors import ClientUseError, EngineGoneError, EngineTimeoutError
from protocol.errors import ConfigError, ErrorCode, ProtocolError, RequestError
from protocol.messages import (
    Abort,
    ErrorInfo,
    FinishReason,
    Generate,
    Hello,
    Reset,
    Role,
    SamplingParams,
    Usage,
)

BAD = ErrorInfo(code=ErrorCode.CONTEXT_LENGTH_EXCEEDED, message="Too long.", param="prompt")
FULL = ErrorInfo(code=ErrorCode.OVERLOADED, message="Full.")


@pytest.fixture
def client(endpoint):
    with Client(endpoint.address) as client:
        yield client


def tokens(prompt, sample=0):
    return [*(prompt.encode() if isinstance(prompt, str) else prompt), sample, 7]


def test_results_come_in_the_order_of_the_prompts(endpoint, client):
    endpoint.on_generate = endpoint.hold
    prompts = ["one", [4, 5], "three", "four"]
    done = []
    thread = threading.Timer(0.05, lambda: endpoint.release(newest_first=True))
    thread.start()
    results = client.generate(prompts, on_result=lambda result: done.append(result.index))
    thread.join()
    assert [result.prompt for result in results] == prompts
    assert [result.token_ids for result in results] == [tokens(prompt) for prompt in prompts]
    assert results[1].text == "[4][5][0][7]"
    assert results[1].finish_reason is FinishReason.STOP
    assert results[1].usage == Usage(prompt_tokens=2, completion_tokens=4)
    assert done == [3, 2, 1, 0]


def test_a_second_call_has_its_own_results(client):
    for prompts in (["a", "b"], ["c"], ["d", "e", "f"]):
        results = client.generate(prompts)
        assert [result.token_ids for result in results] == [tokens(prompt) for prompt in prompts]
    assert client.generate([]) == []


def test_samples_of_a_prompt_come_together(client):
    (result,) = client.generate("ab", SamplingParams(n=3))
    assert [sample.token_ids for sample in result.samples] == [tokens("ab", i) for i in range(3)]
    assert result.usage == Usage(prompt_tokens=2, completion_tokens=12)


def test_no_more_than_the_window_is_at_the_engine(endpoint):
    endpoint.on_generate = endpoint.hold
    threading.Timer(0.2, endpoint.release).start()
    with Client(endpoint.address, window=3) as client:
        assert len(client.generate(["x"] * 50)) == 50
    assert endpoint.most_open == 3


def test_the_window_follows_the_engine(endpoint, client):
    endpoint.on_generate = endpoint.hold
    threading.Timer(0.2, endpoint.release).start()
    client.generate(["x"] * 50)
    assert endpoint.most_open == 8  # twice its four slots


def test_a_full_engine_is_asked_again(endpoint, client):
    refuse = endpoint.refuse(FULL)
    times = []

    def refuse_twice(source, generate):
        times.append(time.monotonic())
        (refuse if len(times) <= 2 else endpoint.answer_at_once)(source, generate)

    endpoint.on_generate = refuse_twice
    (result,) = client.generate("x")
    assert result.token_ids == tokens("x")
    assert len(times) == 3
    assert times[2] - times[0] >= 0.4


def test_a_refused_prompt_is_raised_and_the_others_are_aborted(endpoint, client):
    refuse = endpoint.refuse(BAD)
    endpoint.on_generate = lambda source, g: refuse(source, g) if g.prompt == "bad" else None
    with pytest.raises(RequestError, match="Too long\\.") as caught:
        client.generate(["a", "bad", "c"])
    assert (caught.value.code, caught.value.param) == (BAD.code, "prompt")
    assert caught.value.__notes__ == ["That was prompts[1]."]
    endpoint.take(Generate, 3)
    assert [abort.request_id for abort in endpoint.take(Abort, 2)] == [1, 3]


def test_a_refused_prompt_is_returned_where_asked(endpoint, client):
    refuse = endpoint.refuse(BAD)
    endpoint.on_generate = lambda source, g: (
        refuse if g.prompt == "bad" else endpoint.answer_at_once
    )(source, g)
    first, second, third = client.generate(["a", "bad", "c"], return_errors=True)
    assert (first.token_ids, third.token_ids) == (tokens("a"), tokens("c"))
    assert second.error.code is BAD.code


def test_a_slow_engine_is_left_after_the_timeout(endpoint, client):
    endpoint.on_generate = endpoint.hold
    started = time.monotonic()
    with pytest.raises(EngineTimeoutError, match="timeout_s, 0\\.2 s") as caught:
        client.generate(["a", "b"], timeout_s=0.2)
    assert isinstance(caught.value, TimeoutError)
    assert 0.2 <= time.monotonic() - started < 5
    endpoint.take(Generate, 2)
    endpoint.take(Abort, 2)
    endpoint.release()
    assert client.generate("c")[0].token_ids == tokens("c")


def test_an_error_in_a_callback_aborts_the_rest(endpoint, client):
    endpoint.on_generate = lambda source, g: (
        endpoint.answer_at_once(source, g) if g.prompt == "a" else None
    )

    def fail(result):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.generate(["a", "b"], on_result=fail)
    endpoint.take(Generate, 2)
    assert endpoint.take(Abort)[0].request_id == 2


# ------------------------------------------------------------------------------
# Calls inside calls, and threads


def test_calls_may_be_nested(client):
    seen = []
    outer = client.stream("outer")
    for delta in outer:
        (inner,) = client.generate("in")
        seen += delta.token_ids
        assert inner.token_ids == tokens("in")
        assert client.status().model == "fake"
    assert seen == tokens("outer")


def test_another_thread_is_refused_while_a_call_runs(endpoint, client):
    endpoint.on_generate = endpoint.hold
    refused = []

    def intrude():
        endpoint.take(Generate)
        with pytest.raises(ClientUseError, match="in use by another thread"):
            client.status()
        refused.append(True)
        endpoint.release()

    thread = threading.Thread(target=intrude)
    thread.start()
    assert client.generate("x")[0].token_ids == tokens("x")
    thread.join()
    assert refused == [True]


def test_threads_may_take_turns(client):
    results = []
    for prompt in ("a", "b"):
        thread = threading.Thread(target=lambda p=prompt: results.extend(client.generate(p)))
        thread.start()
        thread.join()
    assert [result.token_ids for result in results] == [tokens("a"), tokens("b")]


# ------------------------------------------------------------------------------
# Status, abort, close


def test_status_says_how_the_engine_is(endpoint, client):
    status = client.status()
    assert (status.model, status.ready, status.facts.slots) == ("fake", True, 4)
    endpoint.answers_status = False
    with pytest.raises(EngineTimeoutError):
        client.status(timeout_s=0.1)


def test_the_prefix_cache_can_be_reset(endpoint, client):
    assert client.reset_prefix_cache() == 2
    endpoint.reset_error = FULL
    with pytest.raises(RequestError, match=r"Full\."):
        client.reset_prefix_cache()


def test_abort_ends_one_stream_or_all(endpoint, client):
    endpoint.on_generate = endpoint.hold
    streams = [client.stream(text) for text in "abc"]
    client.abort(streams[1].request_id)
    assert [delta.finish_reason for delta in streams[1]] == [FinishReason.ABORT]
    client.abort()
    for stream in streams:
        list(stream)
        assert stream.result().finish_reason is FinishReason.ABORT
    endpoint.take(Generate, 3)
    assert [abort.request_id for abort in endpoint.take(Abort, 3)] == [2, 1, 3]
    client.abort()
    client.abort(12345)


def test_closing_aborts_what_runs_and_ends_the_client(endpoint):
    endpoint.on_generate = endpoint.hold
    client = Client(endpoint.address)
    stream = client.stream("x")
    client.close()
    client.close()
    endpoint.take(Generate)
    endpoint.take(Abort)
    assert [delta.finish_reason for delta in stream] == [FinishReason.ABORT]
    generate, stream = (lambda: client.generate("x")), (lambda: client.stream("x"))
    for call in (client.status, client.abort, generate, stream):
        with pytest.raises(ClientUseError, match="This client is closed"):
            call()


# ------------------------------------------------------------------------------
# An engine that is not there, or not any more


def test_an_address_without_engine(address):
    started = time.monotonic()
    with pytest.raises(EngineGoneError, match="did not answer within 0\\.2 s") as caught:
        Client(address, connect_timeout_s=0.2)
    assert caught.value.address == address
    assert time.monotonic() - started < 5


def test_an_address_that_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match="holds no run\\.json"):
        Client(tmp_path)
    with pytest.raises(ConfigError, match="Cannot connect to ipc://"):
        Client("ipc://" + "x" * 200)


@pytest.mark.parametrize("streams", [False, True])
def test_an_engine_that_is_killed_is_noticed_at_once(endpoint, client, streams):
    endpoint.on_generate = endpoint.hold
    timer = threading.Timer(0.1, endpoint.stop)
    timer.start()
    started = time.monotonic()
    with pytest.raises(EngineGoneError, match=f"The engine at {endpoint.address} has ended"):
        list(client.stream("x")) if streams else client.generate(["x", "y"])
    assert time.monotonic() - started < 15
    timer.join()
    with pytest.raises(EngineGoneError, match="has ended"):
        client.status()


def test_what_an_engine_said_before_it_was_killed_counts(endpoint, client):
    stream = client.stream("last words")
    endpoint.take(Generate)
    client.status()
    endpoint.stop()
    time.sleep(0.05)
    assert [next(stream).token_ids for _ in range(12)] == [[t] for t in tokens("last words")]


def test_an_engine_that_hangs_is_left_after_the_silence_limit(endpoint):
    with Client(endpoint.address, silence_limit_s=0.3) as client:
        endpoint.on_generate = endpoint.hold
        endpoint.answers_status = False
        with pytest.raises(EngineGoneError, match="has answered nothing for 0\\.3 s"):
            client.generate("x", timeout_s=30)


def test_an_engine_that_lives_is_waited_for_beyond_the_silence_limit(endpoint):
    with Client(endpoint.address, silence_limit_s=0.3) as client:
        endpoint.on_generate = endpoint.hold
        threading.Timer(0.8, endpoint.release).start()
        assert client.generate("x")[0].token_ids == tokens("x")


def test_the_frontend_is_told_to_forget_a_client_that_is_closed(endpoint):
    with Client(endpoint.address) as client:
        client.generate("x")
    endpoint.resets.get(timeout=10)
    Client(endpoint.address).close()
    endpoint.resets.get(timeout=10)


def test_an_engine_that_has_dropped_the_client_takes_it_again(endpoint, client):
    assert client.generate("x")[0].token_ids == tokens("x")
    endpoint.forget_all()
    assert client.generate("y")[0].token_ids == tokens("y")


def test_an_engine_that_forgets_the_client(endpoint, client):
    endpoint.on_generate = lambda source, _: endpoint.send(source, Reset())
    with pytest.raises(EngineGoneError, match="does not serve this client"):
        client.generate("x")


def test_another_version_is_named(address):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(address)

        def answer():
            identity, _ = router.recv_multipart()
            hello = Hello(protocol_version=99, role=Role.FRONTEND, identity=b"f")
            router.send_multipart([identity, msgspec.msgpack.encode(hello)])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError, match="speaks protocol version 99"):
            Client(address, connect_timeout_s=5)
        thread.join()

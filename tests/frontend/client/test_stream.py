"""A blocking stream, and every way to leave it."""

import gc
import threading
import time

import pytest

from frontend.client.client import Client
from frontend.client.errors import ClientUseError, EngineTimeoutError
from protocol.columns import pack_int32, pack_int64
from protocol.errors import ErrorCode, RequestError
from protocol.messages import (
    Abort,
    ErrorInfo,
    FinishReason,
    Generate,
    QueuePositions,
    SamplingParams,
    Usage,
)

BAD = ErrorInfo(code=ErrorCode.INVALID_REQUEST, message="No.", param="prompt")


@pytest.fixture
def client(endpoint):
    with Client(endpoint.address) as client:
        yield client


@pytest.fixture
def begun(endpoint):
    """The endpoint sends two of three deltas of every request, and no end."""
    endpoint.on_generate = endpoint.begin
    return endpoint


def test_deltas_come_as_they_are_made(client):
    stream = client.stream("ab")
    deltas = list(stream)
    assert [delta.token_ids for delta in deltas] == [[97], [98], [0], [7]]
    assert [delta.first_index for delta in deltas] == [0, 1, 2, 3]
    assert [delta.finish_reason for delta in deltas] == [None] * 3 + [FinishReason.STOP]
    result = stream.result()
    assert (result.text, result.token_ids) == ("[97][98][0][7]", [97, 98, 0, 7])
    assert result.usage == Usage(prompt_tokens=2, completion_tokens=4)
    assert list(stream) == []


def test_samples_are_told_apart(client):
    stream = client.stream([5], SamplingParams(n=2))
    assert {delta.sample for delta in stream} == {0, 1}
    assert [sample.token_ids for sample in stream.result().samples] == [[5, 0, 7], [5, 1, 7]]


def test_a_stream_that_is_read_to_its_end_aborts_nothing(endpoint, client):
    with client.stream("a") as stream:
        list(stream)
    client.status()
    endpoint.take(Generate)
    assert endpoint.received.empty()


def leave_by_break(client):
    for _ in client.stream("a"):
        break


def leave_by_exception(client):
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the loop is the point
        for _ in client.stream("a"):
            raise ZeroDivisionError


def leave_by_close(client):
    stream = client.stream("a")
    next(stream)
    stream.close()
    assert list(stream) == []


def leave_by_context(client):
    with client.stream("a") as stream:
        next(stream)


def leave_by_dropping(client):
    client.stream("a")


def leave_in_a_cycle(client):
    cycle = [client.stream("a")]
    cycle.append(cycle)
    del cycle
    gc.collect()


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_exception,
        leave_by_close,
        leave_by_context,
        leave_by_dropping,
        leave_in_a_cycle,
    ],
)
def test_leaving_early_aborts_the_request(begun, client, leave):
    leave(client)
    (generate,) = begun.take(Generate)
    (abort,) = begun.take(Abort)
    assert abort.request_id == generate.request_id
    assert client.status().live_requests == 0


def test_a_stream_dropped_in_another_thread_is_aborted_by_who_has_the_client(endpoint):
    endpoint.on_generate = endpoint.hold
    with Client(endpoint.address, silence_limit_s=1.0) as client:
        streams = [client.stream("dropped")]

        def drop():
            endpoint.take(Generate, 2)
            streams.clear()
            assert endpoint.take(Abort)[0].request_id == 1
            endpoint.release()

        thread = threading.Thread(target=drop)
        thread.start()
        assert client.generate("kept")[0].token_ids[-1] == 7
        thread.join()


def test_another_thread_cannot_take_from_a_stream_that_is_being_read(endpoint, client):
    endpoint.on_generate = endpoint.hold
    stream = client.stream("ab")

    def intrude():
        endpoint.take(Generate)
        time.sleep(0.1)  # the other thread reads by now
        with pytest.raises(ClientUseError):
            next(stream)
        endpoint.release()

    thread = threading.Thread(target=intrude)
    thread.start()
    assert [token for delta in stream for token in delta.token_ids] == [97, 98, 0, 7]
    thread.join()


def test_a_stream_that_says_nothing_is_left_after_the_timeout(begun, client):
    stream = client.stream("a", timeout_s=0.2)
    assert [next(stream).token_ids, next(stream).token_ids] == [[97], [0]]
    with pytest.raises(EngineTimeoutError):
        next(stream)
    begun.take(Generate)
    begun.take(Abort)
    assert stream.result().token_ids == [97, 0]
    assert stream.result().finish_reason is None


def test_a_refusal_is_raised_where_the_stream_is_read(endpoint, client):
    endpoint.on_generate = endpoint.refuse(BAD)
    stream = client.stream("a")
    with pytest.raises(RequestError, match="No\\."):
        next(stream)
    with pytest.raises(RequestError, match="half a surrogate pair"):
        client.stream("\ud800")


def test_it_tells_where_its_request_waits(endpoint, client):
    endpoint.on_generate = endpoint.hold
    told = []
    stream = client.stream("ab", on_position=told.append)
    assert stream.queue_position is None
    endpoint.take(Generate)
    for position in (2, 1):
        message = QueuePositions(requests=pack_int64([1]), positions=pack_int32([position]))
        endpoint.send_to_all(message)
    endpoint.release()
    assert next(stream).token_ids == [97]
    assert (told, stream.queue_position) == ([2, 1, 0], 0)
    assert len(list(stream)) == 3

import pytest

from frontend.known_queue import KnownQueue
from protocol.errors import ErrorCode, RequestError
from protocol.messages import ErrorInfo, Ping


def queue(requests, tokens, max_requests=10, max_tokens=100, retry_after_s=7):
    known = KnownQueue()
    known.take(
        Ping(
            waiting_requests=requests,
            waiting_tokens=tokens,
            max_waiting_requests=max_requests,
            max_waiting_tokens=max_tokens,
            retry_after_s=retry_after_s,
        )
    )
    return known


def test_before_the_first_ping_and_while_nobody_waits_the_scheduler_is_asked():
    KnownQueue().check_room(1000, 1000)
    known = queue(0, 0, max_requests=1)
    for _ in range(5):
        known.count(1000)
        known.check_room(1000, 1000)


def test_it_is_full_by_requests():
    known = queue(8, 8)
    known.check_room(2, 1)
    with pytest.raises(RequestError) as caught:
        known.check_room(3, 1)
    assert caught.value.message == (
        "8 sequences are waiting already, and 10 are the most that may; try again in 7 s."
    )
    assert (caught.value.code, caught.value.retry_after_s) == (ErrorCode.OVERLOADED, 7)


def test_it_is_full_by_tokens():
    known = queue(1, 90)
    known.check_room(2, 5)
    with pytest.raises(RequestError, match="90 tokens are waiting already, and 100 are the most"):
        known.check_room(1, 11)


def test_what_was_sent_since_counts_until_the_next_ping():
    known = queue(8, 80)
    known.count(15)
    known.check_room(1, 5)
    with pytest.raises(RequestError, match="95 tokens"):
        known.check_room(1, 6)
    known.count(1)
    with pytest.raises(RequestError, match="10 sequences"):
        known.check_room(1, 1)
    known.take(Ping(waiting_requests=1, max_waiting_requests=10, max_waiting_tokens=100))
    known.check_room(9, 1)


def test_what_is_being_prepared_counts_whatever_becomes_of_it():
    known = queue(8, 8)
    with pytest.raises(RequestError, match="10 sequences"), known.preparing(2):
        known.check_room(1, 1)
    known.check_room(2, 1)


def test_a_refusal_by_the_scheduler_gets_the_same_date():
    known = queue(1, 1, retry_after_s=9)
    full = ErrorInfo(code=ErrorCode.OVERLOADED, message="Full.")
    assert known.explain(full) == ErrorInfo(
        code=ErrorCode.OVERLOADED, message="Full.", retry_after_s=9
    )
    other = ErrorInfo(code=ErrorCode.NUMERIC, message="NaN.")
    assert known.explain(other) is other

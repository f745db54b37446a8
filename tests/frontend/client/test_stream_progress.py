import pytest

from frontend.client.results import Delta, Ended, Queued
from frontend.client.stream_progress import StreamProgress
from protocol.errors import ErrorCode, RequestError


def started(told=None):
    return StreamProgress("ab", 1, None if told is None else told.append)


def a_delta(first_index=0):
    return Delta(request_id=7, sample=0, first_index=first_index, text="a", token_ids=[97])


def test_positions_are_told_and_the_first_delta_ends_them():
    told = []
    progress = started(told)
    assert progress.queue_position is None
    assert [
        progress.take(Queued(request_id=7, position=2)),
        progress.take(Queued(request_id=7, position=1)),
    ] == [None, None]
    delta = a_delta()
    assert progress.take(delta) is delta
    progress.take(a_delta(1))
    assert (told, progress.queue_position) == ([2, 1, 0], 0)


def test_what_never_waited_tells_nothing():
    told = []
    progress = started(told)
    progress.take(a_delta())
    assert (told, progress.queue_position) == ([], None)


def test_an_end_with_an_error_is_raised():
    progress = started()
    assert progress.take(Ended(request_id=7)) is None
    assert progress.has_ended
    progress = started()
    with pytest.raises(RequestError, match="no room"):
        progress.take(Ended(request_id=7, error=RequestError(ErrorCode.OVERLOADED, "no room")))
    assert progress.has_ended

"""Results in the order of the prompts, however they come."""

import pytest

from frontend.client.batch import Batch
from frontend.client.errors import EngineGoneError
from frontend.client.results import Delta, Ended
from frontend.client.session import Session
from protocol.errors import ErrorCode, RequestError
from protocol.messages import Abort, FinishReason


def piece(number, text):
    return Delta(
        request_id=number,
        sample=0,
        first_index=0,
        text=text,
        token_ids=[1],
        finish_reason=FinishReason.STOP,
    )


@pytest.fixture
def session(frontend_side):
    frontend = frontend_side()
    session = Session("ipc://x", frontend.hear, window=10)
    session.greet(b"me", lambda _: None)
    session.receive(frontend.hello())
    session.frontend = frontend
    return session


def start(session, prompts, *, return_errors=False):
    seen = []
    batch = Batch(prompts, None, on_result=seen.append, return_errors=return_errors)
    batch.submit(session, lambda _: None)
    return batch, seen


def test_results_come_in_any_order_and_leave_in_the_prompts(session):
    batch, seen = start(session, ["a", "b", "c"])
    for number in (3, 1, 2):
        assert not batch.is_done
        batch.take(piece(number, str(number)))
        batch.take(Ended(request_id=number))
    assert batch.is_done
    assert [(g.index, g.prompt, g.text) for g in batch.results()] == [
        (0, "a", "1"),
        (1, "b", "2"),
        (2, "c", "3"),
    ]
    assert [generation.index for generation in seen] == [2, 0, 1]


def test_no_prompts_are_done_at_once(session):
    batch, _ = start(session, [])
    assert batch.is_done
    assert batch.results() == []


def test_the_first_error_is_raised_and_names_its_prompt(session):
    batch, _ = start(session, ["a", "b"])
    error = RequestError(ErrorCode.INVALID_REQUEST, "No.")
    with pytest.raises(RequestError, match="No\\.") as caught:
        batch.take(Ended(request_id=2, error=error))
    assert caught.value.__notes__ == ["That was prompts[1]."]
    session.frontend.take()
    batch.abort_rest(session)
    (abort,) = session.frontend.take()
    assert (type(abort), abort.request_id) == (Abort, 1)


def test_errors_are_returned_where_asked(session):
    batch, seen = start(session, ["a", "b"], return_errors=True)
    error = RequestError(ErrorCode.INVALID_REQUEST, "No.")
    batch.take(Ended(request_id=1, error=error))
    batch.take(piece(2, "x"))
    batch.take(Ended(request_id=2))
    refused, fine = batch.results()
    assert (refused.error, refused.text, refused.finish_reason) == (error, "", None)
    assert (fine.error, fine.text) == (None, "x")
    assert len(seen) == 2


def test_the_engines_end_is_always_raised(session):
    batch, _ = start(session, ["a"], return_errors=True)
    with pytest.raises(EngineGoneError):
        batch.take(Ended(request_id=1, error=EngineGoneError("ipc://x", "has ended")))

import json

import pytest

from frontend.http.errors import ANSWERS, HttpError, ending_to_http, error_body, invalid, to_http
from frontend.sample import FAILURES
from protocol.errors import ErrorCode, RequestError
from protocol.messages import ErrorInfo, FinishReason


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_a_status_and_a_sentence(code):
    assert 400 <= ANSWERS[code].status < 600
    assert FAILURES[code].endswith(".")


def test_codes_are_told_apart():
    assert len({answer.code for answer in ANSWERS.values()}) == len(ANSWERS)


@pytest.mark.parametrize(
    "failure",
    [
        RequestError(ErrorCode.OVERLOADED, "Full.", param="n"),
        ErrorInfo(code=ErrorCode.OVERLOADED, message="Full.", param="n"),
    ],
)
def test_a_failure_as_http(failure):
    error = to_http(failure)
    assert (error.status, error.headers) == (429, {"Retry-After": "1"})
    assert json.loads(error_body(error)) == {
        "error": {
            "message": "Full.",
            "type": "rate_limit_error",
            "param": "n",
            "code": "overloaded",
        }
    }


def test_a_refusal_that_knows_when_to_come_again_says_so():
    for failure in (
        RequestError(ErrorCode.OVERLOADED, "Full.", retry_after_s=17),
        ErrorInfo(code=ErrorCode.OVERLOADED, message="Full.", retry_after_s=17),
    ):
        assert to_http(failure).headers == {"Retry-After": "17"}


def test_only_passing_failures_say_when_to_come_again():
    retried = {code for code in ErrorCode if to_http(RequestError(code, "x")).headers}
    assert retried == {ErrorCode.OVERLOADED, ErrorCode.NOT_READY}


def test_ends_that_are_no_answers():
    abort, timeout = ending_to_http(FinishReason.ABORT), ending_to_http(FinishReason.TIMEOUT)
    assert (abort.status, abort.detail.code, abort.headers) == (503, "aborted", {})
    assert (timeout.status, timeout.detail.code) == (504, "timeout")


def test_errors_of_our_own():
    assert HttpError(415, "x").detail.code == "unsupported_media_type"
    assert invalid("n", "is 0").message == "n is 0."

"""Failures as HTTP: one table from what went wrong to what a client is told.

A body is always OpenAI's error object. Its sentences are ours: no exception's text, path or address
gets out.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from protocol.errors import ErrorCode, RequestError
from protocol.messages import ErrorInfo, FinishReason

RETRY_AFTER_S = 1
"""Where nothing is known of when a request may pass."""


class Answer(NamedTuple):
    """How a failure looks over HTTP."""

    status: int
    type: str
    code: str


ANSWERS: Mapping[ErrorCode, Answer] = {
    ErrorCode.INVALID_REQUEST: Answer(400, "invalid_request_error", "invalid_request"),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Answer(
        400, "invalid_request_error", "context_length_exceeded"
    ),
    ErrorCode.MODEL_NOT_FOUND: Answer(404, "invalid_request_error", "model_not_found"),
    ErrorCode.OVERLOADED: Answer(429, "rate_limit_error", "overloaded"),
    ErrorCode.NOT_READY: Answer(503, "server_error", "not_ready"),
    ErrorCode.NUMERIC: Answer(500, "server_error", "numeric_error"),
    ErrorCode.OUT_OF_MEMORY: Answer(500, "server_error", "out_of_memory"),
    # The text's own doing: sent again, it would fail again.
    ErrorCode.TEXT_FAILED: Answer(400, "invalid_request_error", "text_failed"),
    ErrorCode.INTERNAL: Answer(500, "server_error", "internal_error"),
}

_ENDINGS: Mapping[FinishReason, tuple[str, Answer]] = {
    FinishReason.ABORT: (
        "The engine aborted the request.",
        Answer(503, "server_error", "aborted"),
    ),
    FinishReason.TIMEOUT: (
        "The request's time, deadline_s, ran out before its first token.",
        Answer(504, "server_error", "timeout"),
    ),
}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class HttpError(Exception):
    """A request that ends with this status and body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",  # noqa: A002 - OpenAI's word
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(
            message=message,
            type=type,
            param=param,
            code=code or HTTPStatus(status).phrase.lower().replace(" ", "_"),
        )
        self.headers = dict(headers or {})


def invalid(param: str, what: str) -> RequestError:
    """Return the error for a field with an illegal value; `what` completes "`param` …"."""
    return RequestError(ErrorCode.INVALID_REQUEST, f"{param} {what}.", param=param)


def to_http(error: RequestError | ErrorInfo) -> HttpError:
    """Return a failure of the engine client's as HTTP."""
    answer = ANSWERS[error.code]
    retry_after_s = error.retry_after_s or RETRY_AFTER_S
    retry = {"Retry-After": str(retry_after_s)} if answer.status in (429, 503) else None
    return HttpError(
        answer.status,
        error.message,
        type=answer.type,
        code=answer.code,
        param=error.param,
        headers=retry,
    )


def ending_to_http(reason: FinishReason) -> HttpError:
    """Return an end that is no answer (an abort, a timeout without tokens) as HTTP."""
    message, answer = _ENDINGS[reason]
    # OpenAI's client would try again what has used up the time it was given.
    headers = {"x-should-retry": "false"} if reason is FinishReason.TIMEOUT else None
    return HttpError(answer.status, message, type=answer.type, code=answer.code, headers=headers)


def error_body(error: HttpError) -> bytes:
    """Return the body that tells of an error."""
    return msgspec.json.encode(ErrorBody(error=error.detail))

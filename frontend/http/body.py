"""Bodies of requests: read with limits, decoded once.

`null` means absent. Fields that we do not know are ignored and reported; so two readers can never
disagree about a body, the bytes are decoded exactly once.
"""

import asyncio
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from frontend.http.errors import HttpError
from protocol.plain_line import plain_line

BODY_PART_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 60.0

Body = TypeVar("Body", bound=msgspec.Struct)


class Fields(NamedTuple):
    """A JSON object that has not been checked against a type yet."""

    values: dict[str, Any]

    def unknown(self, known: frozenset[str]) -> list[str]:
        """Return the names that are not among `known`."""
        return sorted(self.values.keys() - known)

    def as_type(self, kind: type[Body]) -> Body:
        """Return the fields as a struct. Raises HttpError naming the first that does not fit."""
        try:
            return msgspec.convert(self.values, kind)
        except msgspec.ValidationError as error:
            raise _misfit(str(error)) from error


async def read_fields(request: Request, *, max_bytes: int) -> Fields:
    """Read a request's JSON object. Raises HttpError for anything else."""
    _check_headers(request, max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return _decode(await _read(request.receive, max_bytes))
    except TimeoutError as error:
        raise HttpError(
            408, "The body came too slowly.", headers={"Connection": "close"}
        ) from error


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        async with asyncio.timeout(BODY_PART_TIMEOUT_S):
            message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, "The client left before its body ended.")
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _check_headers(request: Request, max_bytes: int) -> None:
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip()
    if content_type.lower() != "application/json":
        raise HttpError(
            415, f"The content type is {content_type[:64]!r}; it must be application/json."
        )
    encoding = request.headers.get("content-encoding", "identity").strip()
    if encoding.lower() != "identity":
        raise HttpError(415, f"The content encoding is {encoding[:64]!r}; bodies are sent as is.")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        error = _too_large(max_bytes)
        if "expect" in request.headers:
            # The client waits for leave to send its body, and its next words would be taken for it.
            error.headers["Connection"] = "close"
        raise error


def _decode(body: bytes) -> Fields:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        # A RecursionError's text is Python's; the decoder's says what and where.
        reason = (
            "it is nested too deep" if isinstance(error, RecursionError) else _plain(str(error))
        )
        raise HttpError(
            400, f"The body is not valid JSON: {reason}.", code="invalid_json"
        ) from error
    if not isinstance(decoded, dict):
        raise HttpError(400, "The body must be a JSON object.", code="invalid_json")
    return Fields({name: value for name, value in decoded.items() if value is not None})


def _misfit(text: str) -> HttpError:
    """Say what msgspec says, field first: "Expected `int`, got `str` - at `$.max_tokens`"."""
    what, _, place = text.partition(" - at `$")
    path = place.rstrip("`").lstrip(".")
    param = path.partition(".")[0].partition("[")[0] or None
    message = f"{path}: {what}." if path else f"{what}."
    return HttpError(
        400, _plain(message.replace(" | null", "")), param=param and plain_line(param, 64)
    )


def _plain(text: str) -> str:
    return plain_line(text, 300)


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(
        413,
        f"The body is larger than {max_bytes} bytes.",
        code="request_entity_too_large",  # its status's name, which Python 3.13 changes
    )

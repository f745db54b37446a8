"""The edge of the HTTP surface: what holds for every request, before any route sees it.

Decided on the raw path and headers alone, so that no other reading of the same bytes can get past
it: everything needs a key but /health.
"""

import re
import uuid

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.http.errors import HttpError, error_body
from frontend.http.keys import ApiKeys

OPEN_PATH = b"/health"
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Edge:
    """Checks keys and gives every answer a request id."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        """`keys` is None where anybody may ask."""
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-request-id", request_id))
            await send(message)

        scope["cache_domain"] = b""
        error = self._refuse(scope, headers)
        if error is None:
            await self._app(scope, receive, send_with_id)
        else:
            await error_response(error)(scope, receive, send_with_id)

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> HttpError | None:
        if (
            len(scope["headers"]) > MAX_HEADERS
            or sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES
        ):
            return HttpError(
                431,
                f"There may be {MAX_HEADERS} headers, of {MAX_HEADER_BYTES} bytes together.",
                headers={"Connection": "close"},
            )
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # Two lengths for one body: what follows it could be read as another request.
            return HttpError(
                400,
                "Content-Length and Transfer-Encoding exclude each other.",
                headers={"Connection": "close"},
            )
        if self._keys is None or scope["raw_path"] == OPEN_PATH:
            return None
        domain = self._keys.domain_of(headers.get(b"authorization", b""))
        if domain is None:
            return HttpError(
                401,
                "A valid API key is needed: send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope["cache_domain"] = domain
        return None


def error_response(error: HttpError) -> Response:
    """Return the answer that tells of an error."""
    return Response(
        error_body(error),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )

"""Answering: whole, or as a stream of server-sent events.

A stream's status is only sent with its first token, or when it has waited for a while: so what
fails before is a plain HTTP error, and no event comes before there is something to say. What fails
later is an event with an error, then `[DONE]`. A client that leaves ends its request.
"""

import asyncio
from collections.abc import Iterable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.deltas import SampleDelta
from frontend.http.choices import ChoiceDelta, Choices, ClientWatch, watch_client
from frontend.http.dialects import FINISH_REASONS, Dialect, FinishedChoice
from frontend.http.errors import HttpError, ending_to_http, error_body, to_http
from frontend.http.schemas import StreamOptions
from protocol.messages import FinishReason

QUEUED_S = 1.0
"""Silence after which a comment tells a request that waits of its new position in the queue."""
KEEPALIVE_S = 15.0
"""Silence after which a comment is sent, so that nobody on the way gives up on the connection."""
CLIENT_CLOSED_REQUEST = 499
"""For nobody to see: the client has gone."""


async def answer_whole(
    receive: Receive, choices: Choices, dialect: Dialect, headers: dict[str, str]
) -> Response:
    """Return the whole answer once all choices have ended.

    Raises HttpError if one fails, or if time runs out before any has a token.
    """
    finished = [
        FinishedChoice(logprobs=[], prompt_logprobs=[], token_ids=[]) for _ in range(choices.count)
    ]
    left = choices.count
    try:
        with watch_client(receive, choices) as client:
            while left:
                for index, delta in await choices.take():
                    choice = finished[index]
                    choice.text += delta.text
                    choice.logprobs += delta.logprobs
                    choice.prompt_logprobs += delta.prompt_logprobs
                    choice.token_ids += delta.token_ids
                    if delta.is_last:
                        choice.finish_reason = ended_well(delta)
                        left -= 1
                if client.is_gone:
                    return Response(status_code=CLIENT_CLOSED_REQUEST)
        if not any(choice.token_ids for choice in finished):
            _refuse_timeout(choice.finish_reason for choice in finished)
        answer = dialect.answer(finished, choices.usage())
        return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")
    finally:
        choices.close()


class EventStream:
    """An answer as server-sent events: an ASGI application for one request."""

    def __init__(
        self,
        choices: Choices,
        dialect: Dialect,
        options: StreamOptions | None,
        headers: dict[str, str],
    ) -> None:
        self._choices = choices
        self._dialect = dialect
        self._options = options or StreamOptions()
        self._headers = headers
        self._left = choices.count
        self._silence = _Silence(choices)
        self._told_position: int | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the stream. Raises HttpError if it fails before its first byte."""
        try:
            with watch_client(receive, self._choices) as client:
                await self._stream(client, send)
        finally:
            self._silence.stop()
            self._choices.close()

    async def _stream(self, client: ClientWatch, send: Send) -> None:
        news = await self._first_news(client)
        if client.is_gone:
            return
        await send(self._start())
        while True:
            events: list[bytes] = []
            try:
                for index, delta in news:
                    self._add_events(events, index, delta)
            except HttpError as error:
                events += [_event(error_body(error)), _DONE]
                await self._send(send, events, is_last=True)
                return
            if self._left == 0:
                await self._send(send, [*events, self._end()], is_last=True)
                return
            if events or self._has_comment():
                await self._send(send, events or [self._comment()], is_last=False)
            news = await self._choices.take()
            if client.is_gone:
                return

    async def _first_news(self, client: ClientWatch) -> list[ChoiceDelta]:
        """Wait for the first deltas, or for long enough. Raises HttpError if one is a failure."""
        news = await self._choices.take()
        while not (news or client.is_gone or self._has_comment()):
            news = await self._choices.take()
        ends = [ended_well(delta) for _, delta in news if delta.is_last]
        if not any(delta.token_ids for _, delta in news):
            _refuse_timeout(ends)
        return news

    def _has_comment(self) -> bool:
        """Return whether it is time to say something although nothing was made."""
        position = self._choices.queue_position
        if position and position != self._told_position:
            if self._silence.lasts(QUEUED_S):
                return True
            self._silence.remind(QUEUED_S)
        return self._silence.lasts(KEEPALIVE_S)

    def _comment(self) -> bytes:
        self._told_position = self._choices.queue_position
        if not self._told_position:
            return b": keepalive\n\n"
        return b": queued position=%d\n\n" % self._told_position

    def _start(self) -> dict[str, object]:
        headers = {
            "content-type": "text/event-stream",
            "cache-control": "no-cache",
            # Proxies that collect answers before they pass them on would undo the stream.
            "x-accel-buffering": "no",
            **self._headers,
        }
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}

    def _add_events(self, events: list[bytes], index: int, delta: SampleDelta) -> None:
        """Add the events of what a choice has gained. Raises HttpError if it has failed."""
        usage = self._choices.usage() if self._options.continuous_usage_stats else None
        # An end without text needs no event before its own, unless it is the choice's first.
        if delta.text or delta.token_ids or not delta.is_last or not self._dialect.has_begun(index):
            events.append(_event(msgspec.json.encode(self._dialect.delta(index, delta, usage))))
        if delta.is_last:
            reason = ended_well(delta)
            events.append(_event(msgspec.json.encode(self._dialect.finish(index, reason, usage))))
            self._left -= 1

    def _end(self) -> bytes:
        if not self._options.include_usage:
            return _DONE
        usage = self._dialect.usage(self._choices.usage())
        return _event(msgspec.json.encode(usage)) + _DONE

    async def _send(self, send: Send, events: list[bytes], *, is_last: bool) -> None:
        self._silence.end_now()
        body = b"".join(events)
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})


class _Silence:
    """Nudges a stream that has been silent for long. One timer a stream, not one an event."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(KEEPALIVE_S, self._check)
        self._reminder: asyncio.TimerHandle | None = None

    def lasts(self, seconds: float) -> bool:
        """Return whether it has lasted for so long."""
        return self._loop.time() - self._since >= seconds

    def remind(self, seconds: float) -> None:
        """Nudge once it has lasted for so long."""
        if self._reminder is None:
            self._reminder = self._loop.call_at(self._since + seconds, self._nudge)

    def end_now(self) -> None:
        """Start counting anew."""
        self._since = self._loop.time()

    def stop(self) -> None:
        """Stop the timers."""
        self._timer.cancel()
        if self._reminder is not None:
            self._reminder.cancel()

    def _nudge(self) -> None:
        self._reminder = None
        self._choices.nudge()

    def _check(self) -> None:
        if self.lasts(KEEPALIVE_S):
            self._choices.nudge()
        wait = self._since + KEEPALIVE_S - self._loop.time()
        self._timer = self._loop.call_later(wait if wait > 0 else KEEPALIVE_S, self._check)


_DONE = b"data: [DONE]\n\n"


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def ended_well(delta: SampleDelta) -> FinishReason:
    """Return how a sample ended. Raises HttpError if that is no answer."""
    if delta.error is not None:
        raise to_http(delta.error)
    if delta.finish_reason not in FINISH_REASONS:
        raise ending_to_http(delta.finish_reason or FinishReason.ABORT)
    return delta.finish_reason


def _refuse_timeout(ends: Iterable[FinishReason]) -> None:
    """Raise HttpError if one of these ends, of choices without tokens, is a timeout."""
    if FinishReason.TIMEOUT in ends:
        raise ending_to_http(FinishReason.TIMEOUT)

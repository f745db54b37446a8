"""One ZeroMQ client: its connection, its requests, and the task that sends their output."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from frontend.deltas import DeltaQueue, SampleDelta, TokenLogprobs
from frontend.engine_client import EngineClient
from frontend.generation import DeadlineError, GenerationRequest, deadline_after
from frontend.live_request import LiveRequest
from protocol.columns import pack_float32, pack_int32, pack_int64
from protocol.connection import Connection
from protocol.errors import ErrorCode, ProtocolError, RequestError
from protocol.messages import (
    Abort,
    AbortAck,
    AbortState,
    CacheReset,
    ChatMessage,
    ClientToFrontend,
    ErrorInfo,
    FinishReason,
    Generate,
    LogprobColumns,
    Output,
    QueuePositions,
    ResetCache,
    Status,
    StatusReply,
    Usage,
)

ABORT_TIMEOUT_S = 5.0
"""How long the scheduler may take to confirm an abort before its client is told all the same."""
MAX_REQUESTS = 4096
"""Of one client at once."""
NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0)

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _ClientRequest:
    """A client's request, from its Generate to its last Output."""

    message: Generate
    received: float
    """When it came, in seconds on the monotonic clock."""
    task: asyncio.Task[None] | None = None
    """Prepares and starts it."""
    live: LiveRequest | None = None
    whole: dict[int, SampleDelta] | None = None
    """Where it is not streamed: what each sample has produced so far."""
    early_aborts: dict[int, Abort] = field(default_factory=dict)
    """Of single samples, from before it was started: the others are still wanted."""
    num_open: int = 0
    """Samples whose last Output has not been sent."""


class ClientSession:
    """A client from its Hello until it leaves. Close it: its requests are aborted then."""

    def __init__(
        self, connection: Connection[ClientToFrontend], engine: EngineClient, model: str
    ) -> None:
        self.connection = connection
        self._engine = engine
        self._model = model
        self._queue = DeltaQueue()
        self._requests: dict[int, _ClientRequest] = {}
        self._by_engine_id: dict[int, _ClientRequest] = {}
        self._answers: set[asyncio.Task[None]] = set()
        # Answers to resets come in the order in which they were asked for.
        self._resetting = asyncio.Lock()
        self._pump = asyncio.create_task(self._send_outputs())

    def handle(self, message: Generate | Abort | Status | ResetCache) -> None:
        """Do what the client asks. Raises ProtocolError for what no client may ask."""
        match message:
            case Generate():
                self._generate(message)
            case Abort():
                self._abort(message)
            case Status():
                self.connection.send(self._status())
            case ResetCache():
                self._answer_later(self._reset_cache())
            case _:
                assert_never(message)

    def close(self) -> None:
        """Abort the client's requests and forget it."""
        self._pump.cancel()
        for task in self._answers:
            task.cancel()
        for request in self._requests.values():
            self._drop(request)
        self._requests.clear()

    def _generate(self, message: Generate) -> None:
        if message.request_id in self._requests:
            raise ProtocolError(f"Request {message.request_id} is live already.")
        if len(self._requests) >= MAX_REQUESTS:
            self._refuse(message, RequestError(ErrorCode.OVERLOADED, "Too many open requests."))
            return
        request = _ClientRequest(message, time.monotonic(), num_open=message.params.n)
        self._requests[message.request_id] = request
        request.task = asyncio.create_task(self._start(request))

    async def _start(self, request: _ClientRequest) -> None:
        message = request.message
        try:
            prepared = await self._engine.prepare(
                GenerationRequest(
                    prompt=_prompt(message),
                    params=message.params,
                    text_options=message.text_options,
                    priority=message.priority,
                    deadline=deadline_after(request.received, message.deadline_s),
                )
            )
        except RequestError as error:
            del self._requests[message.request_id]
            self._refuse(message, error)
        except DeadlineError:
            del self._requests[message.request_id]
            self._end_all(message, finish_reason=FinishReason.TIMEOUT, usage=NO_USAGE)
        else:
            request.whole = None if message.stream else {}
            # What comes of it is sent by another task, which runs only after this one has ended.
            request.live = self._engine.start(prepared, self._queue)
            self._by_engine_id[request.live.request_id] = request
        for abort in request.early_aborts.values():
            self._abort(abort)

    def _refuse(self, message: Generate, error: RequestError) -> None:
        info = ErrorInfo(
            code=error.code,
            message=error.message[:1024],
            param=error.param,
            retry_after_s=error.retry_after_s,
        )
        self._end_all(message, error=info)

    def _end_all(
        self,
        message: Generate,
        *,
        finish_reason: FinishReason | None = None,
        usage: Usage | None = None,
        error: ErrorInfo | None = None,
    ) -> None:
        """Send the only Output of each sample of a request that was never started."""
        for sample in range(message.params.n):
            self.connection.send(
                Output(
                    request_id=message.request_id,
                    sample=sample,
                    first_index=0,
                    text="",
                    token_ids=b"",
                    finish_reason=finish_reason,
                    usage=usage,
                    error=error,
                )
            )

    def _abort(self, message: Abort) -> None:
        request = self._requests.get(message.request_id)
        if request is None:
            self._acknowledge(message, AbortState.UNKNOWN, 0)
            return
        if message.sample == -1:
            acknowledged = self._drop(request)
            del self._requests[message.request_id]
        elif request.live is None:
            request.early_aborts[message.sample] = message
            return
        else:
            acknowledged = self._engine.abort(request.live, message.sample)
            self._close_samples(request, 1 if acknowledged else 0)
        if request.live is not None and acknowledged is None:
            self._acknowledge(message, AbortState.FINISHED, 0)
        else:
            self._answer_later(self._acknowledge_later(message, acknowledged))

    def _answer_later(self, answer: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(answer)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _reset_cache(self) -> None:
        blocks, info = 0, None
        async with self._resetting:
            try:
                blocks = await self._engine.reset_cache()
            except RequestError as error:
                info = ErrorInfo(code=error.code, message=error.message)
        self.connection.send(CacheReset(blocks_forgotten=blocks, error=info))

    def _drop(self, request: _ClientRequest) -> asyncio.Future[AbortAck] | None:
        if request.live is None:
            if request.task is not None:
                request.task.cancel()
            return None
        self._by_engine_id.pop(request.live.request_id, None)
        return self._engine.abort(request.live)

    async def _acknowledge_later(
        self, message: Abort, acknowledged: asyncio.Future[AbortAck] | None
    ) -> None:
        blocks = 0
        if acknowledged is not None:
            await asyncio.wait({acknowledged}, timeout=ABORT_TIMEOUT_S)
            blocks = acknowledged.result().blocks_returned if acknowledged.done() else 0
        self._acknowledge(message, AbortState.LIVE, blocks)

    def _acknowledge(self, message: Abort, state: AbortState, blocks: int) -> None:
        self.connection.send(
            AbortAck(
                request_id=message.request_id,
                sample=message.sample,
                state=state,
                blocks_returned=blocks,
            )
        )

    async def _send_outputs(self) -> None:
        while True:
            deltas = await self._queue.take()
            self._send_positions(self._queue.take_positions())
            for delta in deltas:
                request = self._by_engine_id.get(delta.request_id)
                if request is not None and request.live is not None:
                    self._output(request, request.live, delta)

    def _send_positions(self, positions: dict[int, int]) -> None:
        """Tell of the requests that stream where they wait; of others nobody would look."""
        told = {
            request.message.request_id: position
            for engine_id, position in positions.items()
            if (request := self._by_engine_id.get(engine_id)) and request.message.stream
        }
        if told:
            message = QueuePositions(requests=pack_int64(told), positions=pack_int32(told.values()))
            self.connection.send(message)

    def _output(self, request: _ClientRequest, live: LiveRequest, delta: SampleDelta) -> None:
        if request.whole is not None:
            whole = request.whole.setdefault(delta.sample, delta)
            if whole is not delta:
                whole.merge(delta)
            if not whole.is_last:
                return
            delta = whole
        self.connection.send(
            Output(
                request_id=request.message.request_id,
                sample=delta.sample,
                first_index=delta.first_index,
                text=delta.text,
                token_ids=pack_int32(delta.token_ids),
                logprobs=_columns(delta.logprobs, live.num_prompt_tokens + delta.first_index),
                prompt_logprobs=_columns(delta.prompt_logprobs[1:], 1),
                finish_reason=delta.finish_reason,
                usage=live.sample_usage(delta.sample) if delta.is_last else None,
                params=live.samples[delta.sample].sequence.params if delta.is_last else None,
                error=delta.error,
            )
        )
        if delta.is_last:
            self._close_samples(request, 1)

    def _close_samples(self, request: _ClientRequest, count: int) -> None:
        request.num_open -= count
        if request.num_open == 0 and request.live is not None:
            self._by_engine_id.pop(request.live.request_id, None)
            self._requests.pop(request.message.request_id, None)

    def _status(self) -> StatusReply:
        return StatusReply(
            model=self._model,
            ready=self._engine.why_not_ready() is None,
            facts=self._engine.facts,
            live_requests=self._engine.num_live_requests,
            waiting_requests=self._engine.waiting_requests,
            cache=self._engine.cache,
            defaults=self._engine.defaults,
        )


def _prompt(message: Generate) -> str | Sequence[ChatMessage] | bytes:
    """Return what to generate from. Raises RequestError if that is not one thing."""
    if not message.prompt_ids:
        return message.prompt
    if message.prompt or len(message.prompt_ids) % 4:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            "prompt_ids is an int32 column, given instead of prompt.",
            param="prompt_ids",
        )
    return message.prompt_ids


def _columns(entries: list[TokenLogprobs], first_position: int) -> LogprobColumns | None:
    """Return log-probabilities as the columns of one row."""
    if not entries:
        return None
    return LogprobColumns(
        rows=bytes(4 * len(entries)),
        positions=pack_int32(range(first_position, first_position + len(entries))),
        n=pack_int32(len(entry.ids) for entry in entries),
        ids=pack_int32(token_id for entry in entries for token_id in entry.ids),
        values=pack_float32(value for entry in entries for value in entry.values),
        ranks=pack_int32(entry.rank for entry in entries) if entries[0].rank else b"",
    )

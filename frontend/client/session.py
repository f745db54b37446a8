"""The client's side of a conversation with one frontend: frames in, events out.

    submit ─► queue ─► (window) ─Generate─►  frontend
    sink   ◄─ Delta … Delta, Ended ◄─Output─  frontend

Both clients are shells around this core. It knows no socket, no clock and no thread: it is given a
function that sends a frame, and is told of frames that came. What comes of a request goes to the
request's own *sink*, so however calls overlap, none sees another's results. A sink only stores.

Rules:
- Of each request a sink gets deltas, then exactly one `Ended`. Before the first delta it may be
  told where the request waits.
- At most `window` sequences are at the engine; what is submitted beyond waits here, in order.
- A request fails as a whole: an error of one sample ends it, and aborts the others.
- An abort ends a request for its caller at once. Its place in the window is free again when the
  engine has acknowledged it.
- A request that was refused for want of room, and may be `repeated`, goes back to the head of the
  queue. Nothing more is sent then until some request is over, or `try_again` is called.
- A frontend that has forgotten us says Reset. We say Hello again and send anew what was not
  answered; a request whose output had begun fails, for it cannot go on where it was.
- After a failure everything has ended with it, and nothing more can be asked.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

import msgspec

from frontend.client.errors import EngineGoneError
from frontend.client.results import Delta, Ended, Event, Queued, read_output
from protocol.columns import unpack_int32, unpack_int64
from protocol.connection import Codec, Connection
from protocol.errors import EngineError, ErrorCode, ProtocolError, RequestError
from protocol.messages import (
    Abort,
    AbortAck,
    AbortState,
    CacheReset,
    Drain,
    ErrorInfo,
    FinishReason,
    FrontendToClient,
    Generate,
    Hello,
    Output,
    Ping,
    QueuePositions,
    Resend,
    Reset,
    ResetCache,
    Role,
    Status,
    StatusReply,
)


@dataclass(frozen=True, slots=True)
class Failed:
    """What was asked will not be answered."""

    error: EngineError


RequestSink: TypeAlias = Callable[[Event], object]
StatusSink: TypeAlias = Callable[[StatusReply | Failed], object]
ResetSink: TypeAlias = Callable[[CacheReset | Failed], object]
HelloSink: TypeAlias = Callable[[Hello | Failed], object]
AckSink: TypeAlias = Callable[[AbortAck | Failed], object]


@dataclass(slots=True, eq=False)
class _Request:
    """A request from its submission until nothing more can come of it."""

    generate: Generate
    sink: RequestSink
    may_repeat: bool
    open_samples: dict[int, int] = field(default_factory=dict)
    """Samples that have not ended, each with the index of its next token."""
    ack_sinks: list[AckSink] = field(default_factory=list)
    is_sent: bool = False
    has_output: bool = False
    must_repeat: bool = False
    is_aborted: bool = False
    """The engine has been told, and its acknowledgement is awaited."""
    is_ended: bool = False
    """Its sink has got `Ended`."""

    def __post_init__(self) -> None:
        self.open_samples = dict.fromkeys(range(self.generate.params.n), 0)


class Session:
    """One client's requests at one frontend."""

    def __init__(self, address: str, send_frame: Callable[[bytes], object], *, window: int) -> None:
        """`address` is for messages; `window` is the most sequences at the engine at once."""
        self.address = address
        self.window = window
        self.failure: EngineError | None = None
        """Why nothing more can be asked."""
        self.is_held_back = False
        """The engine had no room: what waits here is not sent for now."""
        self._send_frame = send_frame
        self._codec: Codec[FrontendToClient] = Codec(FrontendToClient)
        self._connection = Connection(send_frame, self._codec)
        self._identity = b""
        self._frontend: Hello | None = None
        self._awaits_hello = False
        self._is_served = False
        """The frontend has answered something since its last Hello."""
        self._requests: dict[int, _Request] = {}
        self._queue: deque[_Request] = deque()
        self._num_sequences = 0
        self._last_request_id = 0
        self._status_sinks: deque[StatusSink] = deque()
        self._reset_sinks: deque[ResetSink] = deque()
        self._hello_sink: HelloSink | None = None

    @property
    def is_greeted(self) -> bool:
        """Whether the frontend has said Hello."""
        return self._frontend is not None

    @property
    def live_request_ids(self) -> list[int]:
        """Requests whose callers still wait, in the order they were submitted."""
        return [number for number, request in self._requests.items() if not request.is_ended]

    # --------------------------------------------------------------------------
    # What callers ask for

    def greet(self, identity: bytes, sink: HelloSink) -> None:
        """Say Hello; the frontend's goes to `sink`."""
        self._hello_sink = sink
        self._identity = identity
        self._say_hello()

    def submit(self, generate: Generate, sink: RequestSink, *, may_repeat: bool = False) -> int:
        """Send a request once there is room, and return the number it is given.

        `may_repeat`: where the engine refuses it for want of room, try again later. Raises what
        the session has failed of.
        """
        self._require_alive()
        self._last_request_id += 1
        request = _Request(
            generate=msgspec.structs.replace(generate, request_id=self._last_request_id),
            sink=sink,
            may_repeat=may_repeat,
        )
        self._requests[self._last_request_id] = request
        self._queue.append(request)
        self._send_waiting()
        return self._last_request_id

    def abort(self, request_id: int, ack_sink: AckSink | None = None) -> bool:
        """End a request: its open samples get the finish reason ABORT.

        Returns whether an acknowledgement is awaited; it goes to `ack_sink`.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        if not request.is_ended:
            for sample, next_index in request.open_samples.items():
                request.sink(_aborted(request_id, sample, next_index))
            self._end(request, None)
        if not request.is_sent:
            del self._requests[request_id]
            return False
        self._tell_to_abort(request)
        if ack_sink is not None:
            request.ack_sinks.append(ack_sink)
        return True

    def ask_status(self, sink: StatusSink) -> None:
        """Ask how the engine is. Raises what the session has failed of."""
        self._require_alive()
        self._status_sinks.append(sink)
        if self._is_connected:
            self._connection.send(Status())

    def ask_cache_reset(self, sink: ResetSink) -> None:
        """Ask to forget every cached prefix. Raises what the session has failed of."""
        self._require_alive()
        self._reset_sinks.append(sink)
        if self._is_connected:
            self._connection.send(ResetCache())

    def try_again(self) -> None:
        """Send what was held back when the engine had no room."""
        self.is_held_back = False
        self._send_waiting()

    def leave(self) -> None:
        """Tell the frontend to forget this client, whose requests it aborts then."""
        if self.failure is None and self._is_connected:
            self._connection.send(Reset())

    def fail(self, error: EngineError) -> None:
        """End everything with an error; the first one counts."""
        if self.failure is not None:
            return
        self.failure = error
        for request in self._requests.values():
            if not request.is_ended:
                self._end(request, error)
            for ack_sink in request.ack_sinks:
                ack_sink(Failed(error))
        self._requests.clear()
        self._queue.clear()
        for sink in [*self._status_sinks, *self._reset_sinks]:
            sink(Failed(error))
        self._status_sinks.clear()
        self._reset_sinks.clear()
        if self._hello_sink is not None:
            self._hello_sink(Failed(error))
            self._hello_sink = None

    # --------------------------------------------------------------------------
    # What the frontend says

    def receive(self, frame: bytes) -> None:
        """Take in one frame. Raises ProtocolError for what no frontend of ours would send."""
        if self.failure is not None:
            return
        message = self._connection.receive(frame)
        match message:
            case Output():
                self._is_served = True
                self._take_output(message)
            case QueuePositions():
                self._take_positions(message)
            case AbortAck():
                self._is_served = True
                self._take_ack(message)
            case StatusReply():
                self._is_served = True
                if self._status_sinks:
                    self._status_sinks.popleft()(message)
            case CacheReset():
                self._is_served = True
                if self._reset_sinks:
                    self._reset_sinks.popleft()(message)
            case Hello():
                self._take_hello(message)
            case Reset():
                self._come_again()
            case None | Ping() | Resend() | Drain():
                pass  # the connection has done what there is to do; a draining engine refuses
            case _:
                assert_never(message)

    def _take_hello(self, hello: Hello) -> None:
        if hello.role is not Role.FRONTEND:
            raise ProtocolError(
                f"A {hello.role.name.lower()} answers at {self.address}; clients talk to frontends."
            )
        if self._frontend is not None and hello.identity != self._frontend.identity:
            self.fail(EngineGoneError(self.address, "has restarted"))
            return
        if not self._awaits_hello:
            return  # it does not know us any more, and the Reset that follows says so
        self._awaits_hello = False
        self._is_served = False
        self._frontend = hello
        self._connection.adopt_epoch(hello.epoch)
        if self._hello_sink is not None:
            self._hello_sink(hello)
            self._hello_sink = None
        for _ in self._status_sinks:
            self._connection.send(Status())
        for _ in self._reset_sinks:
            self._connection.send(ResetCache())
        self._send_waiting()

    def _come_again(self) -> None:
        """Say Hello to a frontend that has forgotten us, and give it anew what it owes us."""
        if not self._is_served:
            # It forgot us as soon as it had met us, and would do so again.
            what = "does not serve this client: its log says why"
            self.fail(EngineGoneError(self.address, what))
            return
        self._say_hello()
        for request in reversed([each for each in self._requests.values() if each.is_sent]):
            if request.has_output and not request.is_ended:
                self._end(request, self._cannot_go_on())
            for ack_sink in request.ack_sinks:
                ack_sink(_acknowledged(request.generate.request_id))
            request.must_repeat = not request.is_ended
            self._leave(request)
        self.is_held_back = False

    def _take_output(self, output: Output) -> None:
        request = self._requests.get(output.request_id)
        if request is None or request.is_ended or request.must_repeat:
            return
        if output.error is not None:
            request.open_samples.pop(output.sample, None)
            self._take_error(request, output.error)
            return
        delta = read_output(output)
        if request.open_samples.get(delta.sample) != delta.first_index:
            raise ProtocolError(
                f"The engine at {self.address} left out tokens, or sent more after the end."
            )
        request.has_output = True
        request.open_samples[delta.sample] += len(delta.token_ids)
        request.sink(delta)
        if delta.finish_reason is not None:
            del request.open_samples[delta.sample]
            if not request.open_samples:
                self._end(request, None)
                self._leave(request)

    def _take_positions(self, message: QueuePositions) -> None:
        positions = unpack_int32(message.positions)
        for request_id, position in zip(unpack_int64(message.requests), positions, strict=True):
            request = self._requests.get(request_id)
            if request is not None and not (request.is_ended or request.has_output):
                request.sink(Queued(request_id=request_id, position=position))

    def _take_error(self, request: _Request, error: ErrorInfo) -> None:
        is_refused = error.code is ErrorCode.OVERLOADED and not request.has_output
        if is_refused and request.may_repeat:
            request.must_repeat = True
        else:
            failure = RequestError(
                error.code, error.message, param=error.param, retry_after_s=error.retry_after_s
            )
            self._end(request, failure)
        if request.open_samples:
            self._tell_to_abort(request)
        else:
            self._leave(request)

    def _take_ack(self, ack: AbortAck) -> None:
        request = self._requests.get(ack.request_id)
        if request is not None and request.is_aborted:
            for ack_sink in request.ack_sinks:
                ack_sink(ack)
            self._leave(request)

    # --------------------------------------------------------------------------

    @property
    def _is_connected(self) -> bool:
        return self._frontend is not None and not self._awaits_hello

    def _say_hello(self) -> None:
        self._connection = Connection(self._send_frame, self._codec)
        self._awaits_hello = True
        self._connection.hello(Hello(role=Role.CLIENT, identity=self._identity))

    def _cannot_go_on(self) -> RequestError:
        return RequestError(
            ErrorCode.OVERLOADED,
            f"The engine at {self.address} has dropped this client, which left too much unread; "
            "what had begun cannot go on.",
        )

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _end(self, request: _Request, error: EngineError | None) -> None:
        request.is_ended = True
        request.sink(Ended(request_id=request.generate.request_id, error=error))

    def _tell_to_abort(self, request: _Request) -> None:
        if not request.is_aborted:
            request.is_aborted = True
            self._connection.send(Abort(request_id=request.generate.request_id))

    def _leave(self, request: _Request) -> None:
        """Free the place of a request of which nothing more comes from the engine."""
        self._num_sequences -= request.generate.params.n
        if request.must_repeat and not request.is_ended:
            request.must_repeat = request.is_sent = request.is_aborted = False
            request.open_samples = dict.fromkeys(range(request.generate.params.n), 0)
            self._queue.appendleft(request)
            self.is_held_back = True
            return
        del self._requests[request.generate.request_id]
        self.try_again()

    def _send_waiting(self) -> None:
        while self._queue and self._is_connected and not self.is_held_back:
            request = self._queue[0]
            if request.is_ended:
                self._queue.popleft()
                continue
            after = self._num_sequences + request.generate.params.n
            if self._num_sequences and after > self.window:
                return
            self._queue.popleft()
            request.is_sent = True
            self._num_sequences = after
            self._connection.send(request.generate)


def _acknowledged(request_id: int) -> AbortAck:
    """Return what stands for the answer of a frontend that has aborted all we had."""
    return AbortAck(request_id=request_id, sample=-1, state=AbortState.UNKNOWN, blocks_returned=0)


def _aborted(request_id: int, sample: int, next_index: int) -> Delta:
    return Delta(
        request_id=request_id,
        sample=sample,
        first_index=next_index,
        text="",
        token_ids=[],
        finish_reason=FinishReason.ABORT,
    )

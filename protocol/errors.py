"""Exceptions, and the codes by which failures cross processes.

    EngineError
    ├── ConfigError         a flag is wrong, or flags contradict          exit 2
    ├── ModelFileError      a model file is missing, bad or unsupported   exit 2
    ├── RequestError        the client asked for something impossible     that request fails
    ├── ProtocolError       a peer sent what the channel does not allow   exit 1
    │   └── BadFrameError   bytes that are not a message of the channel
    ├── ProcessError        a process we depend on is gone or stuck       exit 1
    └── LauncherGoneError   the launcher ended: a child's normal end      exit 0

Exceptions stay inside a process. Between processes a failure is a fact in a message: an
`ErrorCode`.
"""

from protocol.codes import Code


class ErrorCode(Code):
    """Why a sequence or a request failed. Shares its numbers with `FinishReason` in one column."""

    INVALID_REQUEST = 100
    """A field is out of range; the message names it."""
    CONTEXT_LENGTH_EXCEEDED = 101
    """The prompt leaves no room for one output token."""
    MODEL_NOT_FOUND = 102
    """The model named is not the one served."""
    OVERLOADED = 103
    """No room in the waiting queue now; the same request may pass later."""
    NOT_READY = 104
    """The engine is starting or draining."""
    NUMERIC = 105
    """The model produced NaN for this sequence."""
    OUT_OF_MEMORY = 106
    """The step that computed this sequence ran out of device memory."""
    TEXT_FAILED = 107
    """Tokenizing or rendering failed or took too long."""
    INTERNAL = 108
    """Our bug."""


class EngineError(Exception):
    """The root of everything Tokenwire raises on purpose."""


class ConfigError(EngineError):
    """The operator's fault: says which flag and which values are legal."""


class ModelFileError(EngineError):
    """The model directory's fault: says which file, key or tensor, and what would be right."""


class RequestError(EngineError):
    """The client's fault: this request fails, nothing else does."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """`retry_after_s`: whole seconds after which the same may pass, where that is known."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class ProtocolError(EngineError):
    """A peer's fault: it broke the rules of a channel."""


class BadFrameError(ProtocolError):
    """Bytes that do not decode to a message of the channel; says where and why."""


class ProcessError(EngineError):
    """A process this one depends on is gone, stuck or out of step; the run ends."""


class LauncherGoneError(EngineError):
    """The launcher ended, so this process does too. Nobody's fault."""

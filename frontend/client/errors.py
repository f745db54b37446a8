"""What can go wrong between a program and its engine.

EngineError                 (protocol.errors)
├── EngineGoneError         the engine ended, restarted, or does not answer
├── EngineTimeoutError      it is there, but timeout_s passed; also a TimeoutError
├── ClientUseError          the client is closed, or in use elsewhere
├── RequestError            this request is refused or has failed: code, message, param
├── ConfigError             a wrong address; for LLM: what launch.py refuses
├── ProcessError            for LLM: the engine failed while starting
└── ProtocolError           the other end speaks another version, or no Tokenwire at all
"""

from protocol.errors import EngineError


class EngineGoneError(EngineError):
    """There is no engine at the address, or not the one that had these requests."""

    def __init__(self, address: str, what: str) -> None:
        """`what` happened, continuing the sentence "The engine at ADDRESS"."""
        super().__init__(f"The engine at {address} {what}.")
        self.address = address


class EngineTimeoutError(EngineError, TimeoutError):
    """A wait took longer than its timeout_s; what it was for has been aborted."""


class ClientUseError(EngineError):
    """The program's fault: says how a client is to be used."""


def closed() -> ClientUseError:
    """Return what to raise where a client is used after its end."""
    return ClientUseError("This client is closed.")


def no_hello(address: str, timeout_s: float) -> EngineGoneError:
    """Return what to raise where nothing answers a client's first message."""
    return EngineGoneError(
        address,
        f"did not answer within {timeout_s:g} s: it is not running, or this is not its client "
        "address",
    )


def too_slow(address: str, timeout_s: float) -> EngineTimeoutError:
    """Return what to raise where a living engine takes longer than it may."""
    return EngineTimeoutError(
        f"The engine at {address} lives, but said nothing about this call for timeout_s, "
        f"{timeout_s:g} s."
    )

"""Text in, text out: HTTP, the client endpoint, detokenizing; and the Python client library.

    from frontend import LLM, Client, AsyncClient, SamplingParams

The names below are loaded when they are first used, since the launcher and the engine's own
processes import modules of this package too and have no use for them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frontend.client.async_client import AsyncClient
    from frontend.client.async_stream import AsyncStream
    from frontend.client.client import Client
    from frontend.client.errors import ClientUseError, EngineGoneError, EngineTimeoutError
    from frontend.client.llm import LLM
    from frontend.client.requests import Prompt
    from frontend.client.results import Delta, GeneratedSample, Generation
    from frontend.client.stream import Stream
    from protocol.errors import (
        ConfigError,
        EngineError,
        ErrorCode,
        ProcessError,
        ProtocolError,
        RequestError,
    )
    from protocol.messages import ChatMessage, FinishReason, SamplingParams, StatusReply, Usage

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncStream",
    "ChatMessage",
    "Client",
    "ClientUseError",
    "ConfigError",
    "Delta",
    "EngineError",
    "EngineGoneError",
    "EngineTimeoutError",
    "ErrorCode",
    "FinishReason",
    "GeneratedSample",
    "Generation",
    "ProcessError",
    "Prompt",
    "ProtocolError",
    "RequestError",
    "SamplingParams",
    "StatusReply",
    "Stream",
    "Usage",
]

_HOMES = {
    "frontend.client.async_client": ("AsyncClient",),
    "frontend.client.async_stream": ("AsyncStream",),
    "frontend.client.client": ("Client",),
    "frontend.client.errors": ("ClientUseError", "EngineGoneError", "EngineTimeoutError"),
    "frontend.client.llm": ("LLM",),
    "frontend.client.requests": ("Prompt",),
    "frontend.client.results": ("Delta", "GeneratedSample", "Generation"),
    "frontend.client.stream": ("Stream",),
    "protocol.errors": (
        "ConfigError",
        "EngineError",
        "ErrorCode",
        "ProcessError",
        "ProtocolError",
        "RequestError",
    ),
    "protocol.messages": ("ChatMessage", "FinishReason", "SamplingParams", "StatusReply", "Usage"),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            value: object = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

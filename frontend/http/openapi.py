"""The OpenAPI document, from the types that decode and encode the bodies."""

from typing import Any, NamedTuple

import msgspec

from frontend.http.errors import ErrorBody
from frontend.http.replies import (
    ChatCompletion,
    Completion,
    DetokenizeReply,
    Health,
    ModelCard,
    ModelList,
    ResetPrefixCacheReply,
    TokenizeReply,
    TokenizerInfo,
    Version,
)
from frontend.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

Struct = type[msgspec.Struct]


class Operation(NamedTuple):
    """One route, described."""

    method: str
    path: str
    summary: str
    body: Struct | None
    reply: Struct


OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a chat", ChatRequest, ChatCompletion),
    Operation("post", "/v1/completions", "Continue a prompt", CompletionRequest, Completion),
    Operation("get", "/v1/models", "The models served", None, ModelList),
    Operation("get", "/v1/models/{model}", "One model", None, ModelCard),
    Operation("get", "/health", "Whether requests are served", None, Health),
    Operation("get", "/ping", "The same as /health", None, Health),
    Operation("get", "/version", "What serves here", None, Version),
    Operation("post", "/tokenize", "Text to token ids", TokenizeRequest, TokenizeReply),
    Operation("post", "/detokenize", "Token ids to text", DetokenizeRequest, DetokenizeReply),
    Operation("post", "/reset_prefix_cache", "Forget cached prefixes", None, ResetPrefixCacheReply),
    Operation("get", "/tokenizer_info", "Special tokens and chat template", None, TokenizerInfo),
)


def document(version: str) -> dict[str, Any]:
    """Return the OpenAPI document."""
    types = {kind for operation in OPERATIONS for kind in (operation.body, operation.reply) if kind}
    _, components = msgspec.json.schema_components(
        [*sorted(types, key=lambda kind: kind.__name__), ErrorBody],
        ref_template="#/components/schemas/{name}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tokenwire", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer", "content": _json(operation.reply)},
            "default": {"description": "What went wrong", "content": _json(ErrorBody)},
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.body)}
    if operation.reply in (ChatCompletion, Completion):
        described["responses"]["200"]["content"]["text/event-stream"] = {}
    if "{model}" in operation.path:
        described["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return described


def _json(kind: Struct) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}

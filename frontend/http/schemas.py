"""Bodies of requests, as OpenAI's clients and vLLM's send them.

Every field is optional in JSON and may be null, which means absent; what is required is said by the
endpoint. Two kinds of fields are not here: those of `ONE_VALUE`, which this engine cannot honour
and so accepts only with the value that asks for nothing, and all others, which are ignored and
named in the response header `x-ignored-fields`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from protocol.messages import MAX_SAMPLES, MAX_TOP_LOGPROBS

MAX_SEQUENCES = 64
"""Prompts times samples in one request."""

ONE_VALUE: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "spaces_between_special_tokens": (True,),
}
"""Fields that this engine knows and cannot honour, with the values that ask for nothing."""

OF_ONE_ENDPOINT: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
}
"""The same of fields that one of the two endpoints honours."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream reports beside its choices."""

    include_usage: bool | None = None
    """A last event with the tokens taken, and no choices."""
    continuous_usage_stats: bool | None = None
    """The tokens taken so far, in every event."""


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints take: how to choose tokens, and how to answer."""

    model: str | None = None
    """The name of the model served; absent: that one."""
    max_tokens: int | None = None
    temperature: float | None = None
    """Absent, like the next four: the model's default."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    """By token id, in decimal digits."""
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Candidates to report for each token of the prompt; not of a stream."""
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    best_of: int | None = None
    """Only n itself: choosing among more samples is not supported."""
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = None
    """Keep so many of the prompt's last tokens; -1: as many as max_tokens leave room for."""
    return_tokens_as_token_ids: bool = False
    """Call tokens `token_id:N` in log-probabilities, in place of their text."""
    return_sampling_params: bool = False
    """Give the parameters in effect beside the choices; in a stream, with its first event."""
    return_token_ids: bool = False
    """Give each choice's output token ids beside its text, the token that ended it included."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """Keeps this request's prefix-cache blocks to requests with the same salt."""
    priority: int = 0
    """Higher runs first. (vLLM's lower runs first.)"""
    deadline_s: float | None = None
    """Seconds from the arrival of the body by which the answer ends, if need be unfinished."""


class TextPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A piece of a message's content."""

    text: str


class InputMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[Any] | None = None
    """Must be empty: tools are not supported."""


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[InputMessage] = []
    tools: list[dict[str, Any]] = []
    """Shown to the model by its template; needs tool_choice none, since calls come as text."""
    documents: list[dict[str, Any]] = []
    chat_template: str | None = None
    """The name of one of the model's templates."""
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    max_completion_tokens: int | None = None
    """The newer name of max_tokens."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] = ""
    """Text, texts, token ids, or several lists of them."""
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize."""

    prompt: str = ""
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[int] = []


def known_fields(kind: type[SamplingFields]) -> frozenset[str]:
    """Return the names that a body of this type may have without being reported as ignored."""
    return frozenset(kind.__struct_fields__) | unsupported_fields(kind).keys()


def unsupported_fields(kind: type[SamplingFields]) -> dict[str, tuple[Any, ...]]:
    """Return the fields that a body of this type may have with one value only."""
    others = (item for item in OF_ONE_ENDPOINT.items() if item[0] not in kind.__struct_fields__)
    return {**ONE_VALUE, **dict(others)}

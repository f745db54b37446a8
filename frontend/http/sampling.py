"""From the fields of a body to what the engine client is asked."""

import hashlib
from typing import Any

from frontend.http.errors import invalid
from frontend.http.schemas import (
    MAX_SEQUENCES,
    ChatRequest,
    CompletionRequest,
    InputMessage,
    SamplingFields,
    unsupported_fields,
)
from frontend.text_options import TextFields, pack_text_options
from protocol.columns import pack_int32
from protocol.messages import ChatMessage, SamplingParams, TextOptions


def refuse_unsupported(values: dict[str, Any], kind: type[SamplingFields]) -> None:
    """Refuse fields that would change the answer if they were honoured. Raises RequestError.

    `values` is the whole body, of the type `kind`.
    """
    if kind is ChatRequest and values.get("tools") and values.get("tool_choice") != "none":
        raise invalid(
            "tool_choice",
            'must be "none" where there are tools: the chat template shows them to the model, and '
            "what it calls comes as text",
        )
    for name, accepted in unsupported_fields(kind).items():
        if name in values and values[name] not in accepted:
            allowed = " or ".join(repr(value) for value in accepted)
            hint = f", or give {allowed}" if accepted else ""
            raise invalid(name, f"is not supported: leave it out{hint}")


def sampling_params(
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Return sampling parameters; their ranges are the engine client's to check.

    Raises RequestError for fields that contradict each other.
    """
    if fields.best_of not in (None, fields.n):
        raise invalid("best_of", f"is {fields.best_of}; only n itself ({fields.n}) is supported")
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid("prompt_logprobs", "comes with whole answers only: leave out stream")
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "needs stream to be true")
    return SamplingParams(
        temperature=fields.temperature,
        top_k=fields.top_k,
        top_p=fields.top_p,
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        logit_bias=_logit_bias(fields.logit_bias),
        allowed_token_ids=fields.allowed_token_ids,
        bad_words=fields.bad_words,
        seed=fields.seed,
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        n=fields.n,
        stop=[fields.stop] if isinstance(fields.stop, str) else fields.stop,
        stop_token_ids=fields.stop_token_ids,
        ignore_eos=fields.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        skip_special_tokens=fields.skip_special_tokens,
        include_stop_str_in_output=fields.include_stop_str_in_output,
    )


def chat_params(fields: ChatRequest) -> SamplingParams:
    """Return the sampling parameters of a chat request. Raises RequestError."""
    newer, older = fields.max_completion_tokens, fields.max_tokens
    if newer is not None and older is not None and newer != older:
        raise invalid("max_completion_tokens", f"is {newer} and max_tokens is {older}")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    max_tokens = older if newer is None else newer
    return sampling_params(
        fields,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
    )


def completion_params(fields: CompletionRequest) -> SamplingParams:
    """Return the sampling parameters of a completion request. Raises RequestError."""
    if fields.echo and fields.truncate_prompt_tokens is not None:
        raise invalid("echo", "excludes truncate_prompt_tokens: the text would be another's")
    prompt_logprobs = fields.prompt_logprobs
    if fields.echo and fields.logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, fields.logprobs)
    return sampling_params(
        fields,
        max_tokens=fields.max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def chat_options(fields: ChatRequest) -> TextOptions:
    """Return how a chat becomes tokens. Raises RequestError."""
    return pack_text_options(
        TextFields(
            chat_template=fields.chat_template,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            tools=fields.tools,
            documents=fields.documents,
            chat_template_kwargs=fields.chat_template_kwargs,
        )
    )


def chat_messages(messages: list[InputMessage]) -> list[ChatMessage]:
    """Return a chat's messages with their text parts joined. Raises RequestError."""
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def completion_prompts(prompt: str | list[str | int | list[int]], n: int) -> list[str | bytes]:
    """Return the prompts of a completion request: texts, or int32 columns of token ids.

    Raises RequestError for lists that are neither.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "is empty: give text or token ids")
    if isinstance(prompt[0], int):
        return [_column(prompt)]
    if len(prompt) * n > MAX_SEQUENCES:
        raise invalid(
            "prompt", f"and n ask for {len(prompt) * n} sequences; at most {MAX_SEQUENCES}"
        )
    return [_one_prompt(part, isinstance(prompt[0], str)) for part in prompt]


def cache_domain(key_domain: bytes, salt: str | None) -> bytes:
    """Return whose prefix-cache blocks a request may share: its key's, narrowed by its salt."""
    if salt is None:
        return key_domain
    return hashlib.sha256(key_domain + b"\0" + salt.encode()).digest()[:16]


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    """Return biases by token id. Raises RequestError for a key that is none or comes twice."""
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 10:
            raise invalid("logit_bias", f"has a key {key[:64]!r}; keys are token ids in digits")
        if int(key) in biases:
            raise invalid("logit_bias", f"names token {int(key)} twice")
        biases[int(key)] = bias
    return biases


def _message(message: InputMessage, place: str) -> ChatMessage:
    if message.tool_calls:
        raise invalid(f"{place}.tool_calls", "is not supported: tools are not")
    if message.content is None:
        raise invalid(f"{place}.content", "is missing: give text, or parts of type text")
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    return ChatMessage(role=message.role, content=content)


def _one_prompt(part: str | int | list[int], expects_text: bool) -> str | bytes:
    if isinstance(part, str) and expects_text:
        return part
    if isinstance(part, list) and not expects_text:
        return _column(part)
    raise invalid("prompt", "mixes text and token ids: send them apart")


def _column(ids: list[Any]) -> bytes:
    if not all(isinstance(token_id, int) for token_id in ids):
        raise invalid("prompt", "mixes token ids and lists: send them apart")
    try:
        return pack_int32(ids)
    except OverflowError as error:
        raise invalid("prompt", "holds a token id that does not fit 32 bits") from error

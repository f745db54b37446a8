"""From what a caller gives to `Generate` messages, refusing what no engine could take. No I/O.

What depends on the model (token ids, lengths, roles) the engine checks. Here it is what would not
survive the wire: wrong types, illegal Unicode, sizes above a frame's, parameters out of range.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias

import msgspec

from frontend.text_options import read_text_options
from protocol.columns import pack_int32
from protocol.errors import ErrorCode, RequestError
from protocol.messages import MAX_TEXT_BYTES, ChatMessage, Generate, SamplingParams

Chat: TypeAlias = Sequence[ChatMessage | Mapping[str, str]]
"""Turns of a conversation; a mapping has the keys role and content."""
Prompt: TypeAlias = str | Sequence[int] | Chat
"""Text, token ids, or a chat."""
Prompts: TypeAlias = Prompt | Sequence[Prompt]
"""One prompt or several."""
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, one for each, or the defaults."""

_MAX_MESSAGES = 1024
_MAX_ROLE_LENGTH = 64
_PARAM_FIELDS = msgspec.structs.fields(SamplingParams)
_FIELD_TYPES = {spec.name: spec.type for spec in msgspec.structs.fields(Generate)}

_encode = msgspec.msgpack.Encoder().encode
_decode_params = msgspec.msgpack.Decoder(SamplingParams).decode


def list_prompts(prompts: Prompts) -> list[Prompt]:
    """Return the prompts as a list: a single one becomes a list of one. Raises RequestError."""
    if isinstance(prompts, str):
        return [prompts]
    given: list[Any] = _list("prompts", prompts)
    # A chat's turns and a prompt's token ids are no prompts themselves.
    is_one = bool(given) and isinstance(given[0], SupportsIndex | ChatMessage | Mapping)
    return [prompts] if is_one else given  # type: ignore[list-item]  # told by its first item


def list_chats(chats: Chat | Sequence[Chat]) -> list[Prompt]:
    """Return chats as a list: a single one becomes a list of one. Raises RequestError."""
    listed = list_prompts(chats)
    for index, chat in enumerate(listed):
        turns = () if isinstance(chat, str) else chat
        if not turns or not isinstance(turns[0], ChatMessage | Mapping):
            raise _invalid(f"chats[{index}]", "is no list of chat messages")
    return listed


def build_requests(
    prompts: Sequence[Prompt],
    params: Params,
    *,
    stream: bool,
    text_options: Mapping[str, object] | None = None,
    priority: int = 0,
    deadline_s: float | None = None,
) -> list[Generate]:
    """Return a request for each prompt, numbered 0: whoever sends it numbers it.

    `stream`: whether output is wanted while it is made. Raises RequestError.
    """
    options = read_text_options(text_options)
    _check_field("priority", priority)
    _check_field("deadline_s", deadline_s)
    requests = []
    for index, its_params in enumerate(_params_for_each(params, len(prompts))):
        name = f"prompts[{index}]" if len(prompts) > 1 else "prompt"
        requests.append(
            Generate(
                request_id=0,
                params=its_params,
                stream=stream,
                priority=priority,
                deadline_s=deadline_s,
                text_options=options,
                **_prompt_field(name, prompts[index]),
            )
        )
    return requests


def build_request(
    prompt: Prompt,
    params: SamplingParams | None,
    *,
    stream: bool,
    text_options: Mapping[str, object] | None = None,
    priority: int = 0,
    deadline_s: float | None = None,
) -> Generate:
    """Return a request for one prompt, numbered 0. Raises RequestError."""
    (request,) = build_requests(
        [prompt],
        params,
        stream=stream,
        text_options=text_options,
        priority=priority,
        deadline_s=deadline_s,
    )
    return request


def _prompt_field(name: str, prompt: Prompt) -> dict[str, Any]:
    """Return the field of `Generate` that holds a prompt, by its name. Raises RequestError."""
    if isinstance(prompt, str):
        _check_text(name, prompt)
        return {"prompt": prompt}
    items = _list(name, prompt)
    if not items:
        raise _invalid(name, "is empty: give some text, at least one token id or one message")
    if isinstance(items[0], ChatMessage | Mapping):
        return {"prompt": _chat_messages(name, items)}
    return {"prompt_ids": _pack(name, items)}


def _list(name: str, value: object) -> list[Any]:
    if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
        return list(value)
    raise _invalid(
        name,
        f"is of type {type(value).__name__}; a prompt is text, a list of token ids, or a list of "
        "chat messages",
    )


def _pack(name: str, token_ids: list[Any]) -> bytes:
    try:
        column = pack_int32(token_ids)
    except TypeError as error:
        wrong = next(item for item in token_ids if not isinstance(item, SupportsIndex))
        raise _invalid(
            name, f"holds a {type(wrong).__name__} where a token id is expected"
        ) from error
    except OverflowError as error:
        raise _invalid(name, "holds a token id that does not fit 32 bits") from error
    _check_size(name, len(column))
    return column


def _chat_messages(name: str, turns: list[Any]) -> list[ChatMessage]:
    if len(turns) > _MAX_MESSAGES:
        raise _invalid(name, f"has {len(turns)} messages; at most {_MAX_MESSAGES} are possible")
    messages = [_chat_message(f"{name}[{index}]", turn) for index, turn in enumerate(turns)]
    _check_size(name, sum(len(message.content.encode()) for message in messages))
    return messages


def _chat_message(name: str, turn: Any) -> ChatMessage:  # noqa: ANN401 - it is what we check
    if isinstance(turn, Mapping):
        if set(turn) != {"role", "content"}:
            keys = ", ".join(map(repr, turn))
            raise _invalid(name, f"has the keys {keys}; a message has 'role' and 'content'")
        role, content = turn["role"], turn["content"]
    elif isinstance(turn, ChatMessage):
        role, content = turn.role, turn.content
    else:
        raise _invalid(name, f"is of type {type(turn).__name__}, not a chat message")
    if not isinstance(role, str) or not isinstance(content, str):
        raise _invalid(name, "has a role or content that is not text")
    if not 1 <= len(role) <= _MAX_ROLE_LENGTH:
        raise _invalid(name, f"has a role of {len(role)} characters, not 1 to {_MAX_ROLE_LENGTH}")
    _check_text(name, role)
    _check_text(name, content)
    return ChatMessage(role=role, content=content)


def _check_text(name: str, text: str) -> None:
    """Refuse what UTF-8 cannot hold. Raises RequestError."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise _invalid(
            name, f"holds half a surrogate pair at index {error.start}, which is no character"
        ) from error
    _check_size(name, size)


def _check_size(name: str, size: int) -> None:
    if size > MAX_TEXT_BYTES:
        raise _invalid(name, f"has {size} bytes; at most {MAX_TEXT_BYTES} are possible")


def _params_for_each(params: Params, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        _check_params("params", params)
        return [params] * count
    each = list(params)
    if len(each) != count:
        raise _invalid("params", f"has {len(each)} entries for {count} prompts")
    for index, one in enumerate(each):
        if not isinstance(one, SamplingParams):
            raise _invalid(f"params[{index}]", f"is a {type(one).__name__}, no SamplingParams")
        _check_params(f"params[{index}]", one)
    return each


def _check_field(name: str, value: object) -> None:
    """Refuse what a field of `Generate` does not hold. Raises RequestError."""
    try:
        msgspec.convert(value, _FIELD_TYPES[name])
    except msgspec.ValidationError as error:
        raise _invalid(name, _why(value, error)) from error


def _why(value: object, error: msgspec.ValidationError) -> str:
    return f"is {value!r:.80}: {str(error)[0].lower()}{str(error)[1:]}"


def _check_params(name: str, params: SamplingParams) -> None:
    """Refuse parameters that the engine could not decode. Raises RequestError naming the field."""
    try:
        _decode_params(_encode(params))
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeEncodeError) as error:
        raise _explain_params(name, params) from error


def _explain_params(name: str, params: SamplingParams) -> RequestError:
    for spec, value in zip(_PARAM_FIELDS, msgspec.structs.astuple(params), strict=True):
        try:
            msgspec.convert(value, spec.type)
        except msgspec.ValidationError as error:
            return _invalid(f"{spec.name} of {name}", _why(value, error), param=spec.name)
    # What has the right types holds text that is none.
    word = "stop" if _is_broken(params.stop) else "bad_words"
    return _invalid(f"{word} of {name}", "holds half a surrogate pair", param=word)


def _is_broken(texts: list[str]) -> bool:
    return any("\ud800" <= character <= "\udfff" for text in texts for character in text)


def _invalid(name: str, what: str, *, param: str | None = None) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"{name} {what}.", param=param or name)

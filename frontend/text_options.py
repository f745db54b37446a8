"""From the fields by which clients say how text becomes tokens to what the text process is told.

The names are those of the HTTP API, and the Python client's too. No I/O.
"""

from collections.abc import Mapping

import msgspec

from protocol.errors import ErrorCode, RequestError
from protocol.messages import MAX_TEXT_BYTES, TextOptions

_OWN_FIELDS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
    }
)


class TextFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client may say."""

    add_special_tokens: bool = True
    """For text: let the tokenizer add its BOS and the like."""
    chat_template: str | None = None
    """For chats, as all that follows: the name of one of the model's templates."""
    add_generation_prompt: bool | None = None
    """Absent: true, unless the final message is to be continued."""
    continue_final_message: bool = False
    tools: list[dict[str, object]] = []
    """What the template shows the model as tools."""
    documents: list[dict[str, object]] = []
    chat_template_kwargs: dict[str, object] = {}
    """Further variables of the template, such as enable_thinking."""


def read_text_options(given: Mapping[str, object] | None) -> TextOptions:
    """Return the options of a Python client's mapping. Raises RequestError."""
    if given is None:
        return TextOptions()
    try:
        fields = msgspec.convert(given, TextFields)
    except msgspec.ValidationError as error:
        raise _invalid("text_options", f"do not fit: {error}") from error
    return pack_text_options(fields)


def pack_text_options(fields: TextFields) -> TextOptions:
    """Return fields as the text process takes them. Raises RequestError."""
    if fields.add_generation_prompt and fields.continue_final_message:
        raise _invalid(
            "add_generation_prompt",
            "and continue_final_message exclude each other: an answer begins anew or goes on",
        )
    named_twice = sorted(_OWN_FIELDS & fields.chat_template_kwargs.keys())
    if named_twice:
        raise _invalid("chat_template_kwargs", f"holds {named_twice[0]}, which is a field itself")
    begins_anew = not fields.continue_final_message and fields.add_generation_prompt is not False
    return TextOptions(
        add_special_tokens=fields.add_special_tokens,
        template=_name(fields.chat_template),
        add_generation_prompt=begins_anew,
        continue_final_message=fields.continue_final_message,
        variables=_variables(fields),
    )


def _name(template: str | None) -> str:
    if template is None:
        return ""
    if not 1 <= len(template) <= 64 or not template.isprintable():
        raise _invalid(
            "chat_template",
            "is no name of a template: the model's files or --chat-template bring the templates",
        )
    return template


def _variables(fields: TextFields) -> str:
    variables = dict(fields.chat_template_kwargs)
    if fields.tools:
        variables["tools"] = fields.tools
    if fields.documents:
        variables["documents"] = fields.documents
    if not variables:
        return ""
    try:
        encoded = msgspec.json.encode(variables)
    except (TypeError, ValueError, RecursionError) as error:
        raise _invalid(
            "chat_template_kwargs", "or tools or documents hold what JSON does not"
        ) from error
    if len(encoded) > MAX_TEXT_BYTES:
        raise _invalid("chat_template_kwargs", f"and the like exceed {MAX_TEXT_BYTES} bytes")
    return encoded.decode()


def _invalid(param: str, what: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"{param} {what}.", param=param)

"""A model's chat template, in a sandbox: messages to the prompt that the model was trained on.

The template is the model publisher's code. The sandbox keeps it from Python; the frontend's
deadline and this process's memory limit keep it from looping and from filling the machine.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from protocol.errors import ErrorCode, ModelFileError, RequestError
from protocol.messages import MAX_TEXT_BYTES, ChatMessage


class RefusedByTemplateError(jinja2.TemplateError):
    """What a template raises by `raise_exception`: its sentence is meant for the client."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks an answer for training; here its body counts and nothing else."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 types it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Read the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        name: str = "The model's chat template",
    ) -> None:
        """`name`: what a sentence about it calls it.

        Raises ModelFileError for a template with a syntax error.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            line = (
                f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            )
            reason = str(error).partition("\n")[0].rstrip(".")
            raise ModelFileError(f"{name} is broken{line}: {reason}.") from error
        self._special_tokens: dict[str, object] = dict(special_tokens)
        # A template that does not know the newer name of the system role gets the older one.
        self._developer_role = "developer" if "developer" in source else "system"

    def render(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, object] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt, with `add_generation_prompt` up to where the model's answer begins.

        `variables` are what the template gets beside; what has a special token's name counts
        before it. Raises RequestError with the template's own sentence, or one about it.
        """
        turns = [
            {
                "role": self._developer_role if message.role == "developer" else message.role,
                "content": message.content,
            }
            for message in messages
        ]
        try:
            # Tools and documents are always defined, as in transformers: templates rely on it.
            return self._join(
                self._special_tokens
                | {"tools": None, "documents": None}
                | dict(variables or {})
                | {"messages": turns, "add_generation_prompt": add_generation_prompt}
            )
        except RefusedByTemplateError as error:
            raise _failed(f"The model's chat template refuses the messages: {error}") from error
        except MemoryError as error:
            raise _failed("The model's chat template needs too much memory.") from error
        # Foreign code: it can raise anything, and only this request has failed.
        except Exception as error:
            raise _failed(
                f"The model's chat template fails on the messages ({type(error).__name__})."
            ) from error

    def _join(self, context: Mapping[str, object]) -> str:
        parts: list[str] = []
        size = 0
        for part in self._template.generate(context):
            parts.append(part)
            size += len(part)
            if size > MAX_TEXT_BYTES:
                raise MemoryError
        return "".join(parts)


def _failed(sentence: str) -> RequestError:
    return RequestError(ErrorCode.TEXT_FAILED, sentence[:500], param="messages")


def _refuse(message: str) -> NoReturn:
    raise RefusedByTemplateError(message)


def _now(format: str) -> str:  # noqa: A002 - the name templates use
    return datetime.datetime.now().astimezone().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON for a model to read: without the escapes that jinja2 adds for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )

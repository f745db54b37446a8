"""The work of the text process: one job in, one answer out. No sockets, no clock."""

import logging
from pathlib import Path
from typing import assert_never

import msgspec

from frontend.text.chat_template import ChatTemplate
from frontend.text.encoder import Encoder
from frontend.text.marks import SpecialMarker, cut_after_final_message, unmark
from frontend.text.text_model import DEFAULT_TEMPLATE, TextModel
from protocol.columns import pack_int32
from protocol.errors import ErrorCode, RequestError
from protocol.messages import ChatMessage, TextDone, TextJob, TextKind, TextOptions

NO_TOKENIZER = "This model has no tokenizer: give the prompt as token ids."
TOOL_TEMPLATE = "tool_use"
NO_TEMPLATE = "This model has no chat template: use /v1/completions, or a model that has one."

log = logging.getLogger(__name__)


class TextDesk:
    """Does the text jobs for one model."""

    def __init__(self, model: TextModel) -> None:
        """Raises ModelFileError for a tokenizer or template that cannot be used."""
        self._encoder: Encoder | None = None
        self._templates: dict[str, ChatTemplate] = {}
        if model.tokenizer_file is None:
            return
        self._encoder = Encoder(
            Path(model.tokenizer_file),
            bos=model.special_tokens.get("bos_token"),
            add_bos=model.add_bos,
        )
        self._templates = {
            name: ChatTemplate(source, model.special_tokens, name=_describe(model, name))
            for name, source in model.chat_templates.items()
        }
        sources = "".join(model.chat_templates.values())
        self._marker = SpecialMarker(self._encoder.special_texts, sources)

    def rehearse(self) -> None:
        """Do each kind of job once, so that a template that never works is known from the start."""
        if self._encoder and DEFAULT_TEMPLATE in self._templates:
            try:
                self._render([ChatMessage(role="user", content="Hello.")], TextOptions())
            except RequestError as error:
                log.warning("chat template fails on a plain message: %s", error.message)

    def do(self, job: TextJob) -> TextDone:
        """Return the answer to a job; a failure is an answer too."""
        try:
            return self._do(job)
        except RequestError as error:
            return TextDone(job_id=job.job_id, error=error.message)

    def _do(self, job: TextJob) -> TextDone:
        match job.kind:
            case TextKind.TOKENIZE:
                ids = self._tokenize(job)
                return TextDone(job_id=job.job_id, token_ids=pack_int32(ids))
            case TextKind.RENDER:
                if isinstance(job.payload, str):
                    raise _failed("A chat is a list of messages.")
                text, ids = self._render(job.payload, job.options)
                return TextDone(job_id=job.job_id, token_ids=pack_int32(ids), text=text)
            case TextKind.COMPILE:
                raise _failed("Grammars are not supported.")
            case _:
                assert_never(job.kind)

    def _tokenize(self, job: TextJob) -> list[int]:
        if self._encoder is None:
            raise _failed(NO_TOKENIZER)
        if not isinstance(job.payload, str):
            raise _failed("Only text can be tokenized.")
        return self._encoder.encode(job.payload, add_special_tokens=job.options.add_special_tokens)

    def _render(self, messages: list[ChatMessage], options: TextOptions) -> tuple[str, list[int]]:
        if self._encoder is None:
            raise _failed(NO_TOKENIZER)
        variables = _read_variables(options.variables)
        template = self._template(options.template, has_tools="tools" in variables)
        try:
            marked = self._marker.mark(messages, variables)
        except RecursionError as error:
            raise _failed("The template's variables are nested too deep.") from error
        turns = marked.messages
        if options.continue_final_message and turns:
            last = turns[-1]
            turns[-1] = ChatMessage(role=last.role, content=f"{last.content}{marked.end} ")
        rendered = template.render(
            turns, marked.variables, add_generation_prompt=options.add_generation_prompt
        )
        if options.continue_final_message:
            rendered = cut_after_final_message(rendered, marked.end)
        chat = unmark(rendered, marked.mark)
        return chat.text, self._encoder.encode_chat(chat)

    def _template(self, name: str, *, has_tools: bool) -> ChatTemplate:
        if not self._templates:
            raise _failed(NO_TEMPLATE)
        if not name:
            name = TOOL_TEMPLATE if has_tools and TOOL_TEMPLATE in self._templates else ""
        template = self._templates.get(name or DEFAULT_TEMPLATE)
        if template is None:
            raise RequestError(
                ErrorCode.TEXT_FAILED,
                f"This model has no chat template {name or DEFAULT_TEMPLATE!r}; chat_template may "
                f"be {', '.join(sorted(self._templates))}.",
                param="chat_template",
            )
        return template


def _describe(model: TextModel, name: str) -> str:
    """Return what a sentence about a template calls it."""
    if model.chat_template_file is not None:
        return f"The chat template {model.chat_template_file}"
    named = "" if name == DEFAULT_TEMPLATE else f" {name!r}"
    return f"The model's chat template{named}"


def _read_variables(text: str) -> dict[str, object]:
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _failed(f"The template's variables are no JSON object: {error}.") from error


def _failed(sentence: str) -> RequestError:
    return RequestError(ErrorCode.TEXT_FAILED, sentence)

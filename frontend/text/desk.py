"""The work of the text process: one job in, one answer out. No sockets, no clock."""

import logging
from pathlib import Path
from typing import assert_never

from frontend.text.chat_template import ChatTemplate
from frontend.text.encoder import Encoder
from frontend.text.marks import SpecialMarker, unmark
from frontend.text.text_model import TextModel
from protocol.columns import pack_int32
from protocol.errors import ErrorCode, RequestError
from protocol.messages import ChatMessage, TextDone, TextJob, TextKind

NO_TOKENIZER = "This model has no tokenizer: give the prompt as token ids."
NO_TEMPLATE = "This model has no chat template: use /v1/completions, or a model that has one."

log = logging.getLogger(__name__)


class TextDesk:
    """Does the text jobs for one model."""

    def __init__(self, model: TextModel) -> None:
        """Raises ModelFileError for a tokenizer or template that cannot be used."""
        self._encoder: Encoder | None = None
        self._template: ChatTemplate | None = None
        if model.tokenizer_file is None:
            return
        bos = model.special_tokens.get("bos_token") if model.add_bos else None
        self._encoder = Encoder(Path(model.tokenizer_file), bos=bos)
        if model.chat_template is not None:
            self._template = ChatTemplate(model.chat_template, model.special_tokens)
        self._marker = SpecialMarker(self._encoder.special_texts, model.chat_template or "")

    def rehearse(self) -> None:
        """Do each kind of job once, so that a template that never works is known from the start."""
        if self._encoder and self._template:
            try:
                self._render([ChatMessage(role="user", content="Hello.")])
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
                text, ids = self._render(job.payload)
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
        return self._encoder.encode(job.payload, add_special_tokens=job.add_special_tokens)

    def _render(self, messages: list[ChatMessage]) -> tuple[str, list[int]]:
        if self._encoder is None:
            raise _failed(NO_TOKENIZER)
        if self._template is None:
            raise _failed(NO_TEMPLATE)
        marked, mark = self._marker.mark(messages)
        chat = unmark(self._template.render(marked), mark)
        return chat.text, self._encoder.encode_chat(chat)


def _failed(sentence: str) -> RequestError:
    return RequestError(ErrorCode.TEXT_FAILED, sentence)

import logging

import msgspec
import pytest

from frontend.text.desk import NO_TEMPLATE, NO_TOKENIZER, TextDesk
from frontend.text.text_model import TextModel
from protocol.columns import unpack_int32
from protocol.errors import ModelFileError
from protocol.messages import ChatMessage, TextDone, TextJob, TextKind

CHAT = [ChatMessage(role="user", content="hello")]


@pytest.fixture(scope="module")
def desk(smol):
    return TextDesk(smol)


def job(kind, payload, **fields):
    return TextJob(job_id=3, kind=kind, payload=payload, **fields)


def test_tokenizing(desk):
    done = desk.do(job(TextKind.TOKENIZE, "hello"))
    assert (done.job_id, unpack_int32(done.token_ids), done.error) == (3, [28120], None)


def test_rendering(desk, smol_tokenizer):
    done = desk.do(job(TextKind.RENDER, CHAT))
    assert done.text.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert unpack_int32(done.token_ids) == smol_tokenizer.encode(done.text).ids


@pytest.mark.parametrize(
    ("kind", "payload", "error"),
    [
        (TextKind.TOKENIZE, CHAT, "Only text can be tokenized."),
        (TextKind.RENDER, "text", "A chat is a list of messages."),
        (TextKind.COMPILE, "{}", "Grammars are not supported."),
    ],
)
def test_jobs_that_make_no_sense_are_answered(desk, kind, payload, error):
    assert desk.do(job(kind, payload)) == TextDone(job_id=3, error=error)


@pytest.mark.parametrize(
    ("kind", "payload"), [(TextKind.TOKENIZE, "hello"), (TextKind.RENDER, CHAT)]
)
def test_a_model_without_a_tokenizer_says_so(kind, payload):
    desk = TextDesk(TextModel())
    desk.rehearse()
    assert desk.do(job(kind, payload)).error == NO_TOKENIZER


def test_a_model_without_a_template_still_tokenizes(smol):
    desk = TextDesk(msgspec.structs.replace(smol, chat_template=None))
    desk.rehearse()
    assert desk.do(job(TextKind.RENDER, CHAT)).error == NO_TEMPLATE
    assert desk.do(job(TextKind.TOKENIZE, "hello")).error is None


def test_a_broken_template_is_refused_at_start(smol):
    with pytest.raises(ModelFileError, match="chat template is broken"):
        TextDesk(msgspec.structs.replace(smol, chat_template="{% if %}"))


def test_a_template_that_never_works_is_known_from_the_start(smol, caplog):
    desk = TextDesk(msgspec.structs.replace(smol, chat_template="{{ raise_exception('No.') }}"))
    with caplog.at_level(logging.WARNING):
        desk.rehearse()
    assert "chat template fails on a plain message" in caplog.text

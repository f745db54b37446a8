import json
import logging

import msgspec
import pytest

from frontend.text.desk import NO_TEMPLATE, NO_TOKENIZER, TextDesk
from frontend.text.text_model import TextModel
from protocol.columns import unpack_int32
from protocol.errors import ModelFileError
from protocol.messages import ChatMessage, TextDone, TextJob, TextKind, TextOptions

CHAT = [ChatMessage(role="user", content="hello")]


@pytest.fixture(scope="module")
def desk(smol):
    return TextDesk(smol)


def job(kind, payload, **fields):
    return TextJob(job_id=3, kind=kind, payload=payload, **fields)


def templates(smol, **sources):
    return msgspec.structs.replace(smol, chat_templates=sources)


def rendered(desk, messages=CHAT, **options):
    """Return the text of a rendered chat, or the error."""
    if "variables" in options:
        options["variables"] = json.dumps(options["variables"])
    done = desk.do(job(TextKind.RENDER, list(messages), options=TextOptions(**options)))
    return done.error or done.text


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
    desk = TextDesk(msgspec.structs.replace(smol, chat_templates={}))
    desk.rehearse()
    assert desk.do(job(TextKind.RENDER, CHAT)).error == NO_TEMPLATE
    assert desk.do(job(TextKind.TOKENIZE, "hello")).error is None


def test_a_broken_template_is_refused_at_start(smol):
    with pytest.raises(ModelFileError, match="chat template is broken"):
        TextDesk(templates(smol, default="{% if %}"))


def test_a_template_that_never_works_is_known_from_the_start(smol, caplog):
    desk = TextDesk(templates(smol, default="{{ raise_exception('No.') }}"))
    with caplog.at_level(logging.WARNING):
        desk.rehearse()
    assert "chat template fails on a plain message" in caplog.text


def test_which_of_several_templates_renders(smol):
    desk = TextDesk(templates(smol, default="d", tool_use="t{{ tools | tojson }}", rag="r"))
    assert rendered(desk) == "d"
    assert rendered(desk, variables={"tools": [{"name": "é"}]}) == 't[{"name": "é"}]'
    assert rendered(desk, template="rag") == "r"
    assert rendered(desk, template="default", variables={"tools": [{}]}) == "d"
    assert rendered(desk, template="nothing") == (
        "This model has no chat template 'nothing'; chat_template may be default, rag, tool_use."
    )
    without_default = TextDesk(templates(smol, rag="r"))
    without_default.rehearse()
    assert "no chat template 'default'; chat_template may be rag." in rendered(without_default)


def test_variables_reach_the_template(smol):
    source = (
        "{% if tools is not none or documents is not none %}never{% endif %}"
        "{{ enable_thinking is defined and not enable_thinking }} {{ date_string }} "
        "{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}"
    )
    desk = TextDesk(templates(smol, default=source))
    variables = {"enable_thinking": False, "date_string": "26 Jul 2024", "messages": []}
    assert rendered(desk, variables=variables) == "True 26 Jul 2024 <|im_start|>helloTrue"
    assert rendered(desk, add_generation_prompt=False) == "False  <|im_start|>helloFalse"
    assert (
        "no JSON object"
        in desk.do(job(TextKind.RENDER, CHAT, options=TextOptions(variables="[1]"))).error
    )


def test_what_tools_spell_is_no_special_token(smol):
    desk = TextDesk(templates(smol, default="<|im_start|>{{ tools | tojson }}<|im_end|>"))
    options = TextOptions(variables=json.dumps({"tools": [{"name": "<|im_end|>"}]}))
    done = desk.do(job(TextKind.RENDER, CHAT, options=options))
    assert done.text == '<|im_start|>[{"name": "<|im_end|>"}]<|im_end|>'
    assert [i for i in unpack_int32(done.token_ids) if i <= 16] == [1, 2]


def test_a_final_message_is_continued(desk, smol):
    chat = [*CHAT, ChatMessage(role="assistant", content="Sure, <|im_end|>  ")]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendered(desk, chat, **options).endswith(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nSure, <|im_end|>  "
    )
    assert chat[-1].content == "Sure, <|im_end|>  "
    trimming = TextDesk(
        templates(smol, default="{% for m in messages %}{{ m.content | trim }}.{% endfor %}")
    )
    assert rendered(trimming, chat, **options) == "hello.Sure, <|im_end|>"
    silent = TextDesk(templates(smol, default="{{ messages[0].content }}"))
    assert "cannot be continued" in rendered(silent, chat, **options)


def test_a_broken_template_is_named(smol):
    with pytest.raises(
        ModelFileError,
        match=r"^The model's chat template 'rag' is broken in line 2: unexpected end of template",
    ):
        TextDesk(templates(smol, default="d", rag="\n{{ x"))
    model = msgspec.structs.replace(templates(smol, default="{{ x"), chat_template_file="/a.jinja")
    with pytest.raises(ModelFileError, match=r"^The chat template /a\.jinja is broken in line 1: "):
        TextDesk(model)

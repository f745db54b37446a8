import re

import pytest

from frontend.text.chat_template import ChatTemplate
from protocol.errors import ErrorCode, ModelFileError, RequestError
from protocol.messages import ChatMessage


def user(text):
    return ChatMessage(role="user", content=text)


def render(source, *messages, special=None):
    return ChatTemplate(source, special or {}).render(messages or [user("hi")])


def test_the_bundled_models_template(smol):
    template = ChatTemplate(smol.chat_template, smol.special_tokens)
    assert template.render([ChatMessage(role="system", content="S"), user("hi")]) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render([user("hi")]).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )


def test_what_templates_rely_on():
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index0 > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | trim }};{% endgeneration %}{% endfor %}"
        "{{ {'a': '<é>'} | tojson }}{{ {'a': 1} | tojson(indent=1) }}"
        "{% if not add_generation_prompt %}never{% endif %}{{ strftime_now('%Y') }}"
    )
    text = render(source, user(" 1 "), user("2"), user("3"), special={"bos_token": "<s>"})
    assert re.fullmatch(r'<s>1;2;\{"a": "<é>"\}\{\n "a": 1\n\}20\d\d', text)


def test_the_newer_name_of_the_system_role():
    source = "{% for m in messages %}{{ m.role }} {% endfor %}"
    developer = ChatMessage(role="developer", content="x")
    assert render(source, developer) == "system "
    assert render(source + "{# developer #}", developer) == "developer "


def test_a_template_refuses_with_its_own_sentence():
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception('Roles must alternate.') }}")
    assert caught.value.code is ErrorCode.TEXT_FAILED
    assert caught.value.message == (
        "The model's chat template refuses the messages: Roles must alternate."
    )
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ 1 / 0 }}", r"fails on the messages \(ZeroDivisionError\)"),
        ("{{ messages.nothing.x }}", r"fails on the messages \(UndefinedError\)"),
        ("{{ ''.__class__.__mro__ }}", r"fails on the messages \(SecurityError\)"),
        ("{{ messages.append(1) }}", r"fails on the messages \(SecurityError\)"),
        ("{{ range(1000000) }}", r"fails on the messages \(OverflowError\)"),
        ("{% for i in range(1000) %}{{ 'x' * 100000 }}{% endfor %}", r"needs too much memory"),
    ],
)
def test_a_template_that_fails_costs_one_request(source, sentence):
    with pytest.raises(RequestError, match=sentence):
        render(source)


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x", "{% endgeneration %}", "(" * 10 + "{{" + "("]
)
def test_a_template_with_a_syntax_error_is_refused_at_start(source):
    with pytest.raises(ModelFileError, match="chat template is broken"):
        ChatTemplate(source, {})


def test_deep_nesting_is_a_broken_template():
    with pytest.raises(ModelFileError, match="chat template is broken"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", {})

import json

import pytest

from frontend.text_options import TextFields, pack_text_options, read_text_options
from protocol.errors import ErrorCode, RequestError
from protocol.messages import TextOptions


def test_what_is_left_out_changes_nothing():
    assert read_text_options(None) == read_text_options({}) == TextOptions()
    assert pack_text_options(TextFields()) == TextOptions()


def test_tools_documents_and_variables_become_the_templates_variables():
    options = read_text_options(
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "documents": [{"title": "é"}],
            "chat_template_kwargs": {"enable_thinking": False, "date_string": "1 May"},
            "chat_template": "rag",
            "add_special_tokens": False,
        }
    )
    assert json.loads(options.variables) == {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "documents": [{"title": "é"}],
        "enable_thinking": False,
        "date_string": "1 May",
    }
    assert (options.template, options.add_special_tokens) == ("rag", False)


@pytest.mark.parametrize(
    ("given", "begins", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
    ],
)
def test_an_answer_begins_anew_or_goes_on(given, begins, continues):
    options = read_text_options(given)
    assert (options.add_generation_prompt, options.continue_final_message) == (begins, continues)


@pytest.mark.parametrize(
    ("given", "param", "sentence"),
    [
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "and continue_final_message exclude each other",
        ),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "holds messages, which is a field itself",
        ),
        ({"chat_template": "{{ messages }}\n"}, "chat_template", "is no name of a template"),
        ({"nonsense": 1}, "text_options", "do not fit: Object contains unknown field `nonsense`"),
        ({"tools": "f"}, "text_options", r"Expected `array`, got `str` - at `\$\.tools`"),
        ({"chat_template_kwargs": {"a": object()}}, "chat_template_kwargs", "JSON does not"),
        ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs", "JSON does not"),
        ({"chat_template_kwargs": {"a": "x" * (8 << 20)}}, "chat_template_kwargs", "exceed"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:20],
)
def test_what_makes_no_sense_is_refused(given, param, sentence):
    with pytest.raises(RequestError, match=sentence) as caught:
        read_text_options(given)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, param)

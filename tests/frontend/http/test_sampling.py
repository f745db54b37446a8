import pytest

from frontend.http.sampling import (
    cache_domain,
    chat_messages,
    chat_params,
    completion_params,
    completion_prompts,
    refuse_unsupported,
)
from frontend.http.schemas import (
    ChatRequest,
    CompletionRequest,
    InputMessage,
    TextPart,
    unsupported_fields,
)
from protocol.columns import pack_int32
from protocol.errors import RequestError
from protocol.messages import ChatMessage, SamplingParams


def test_absent_fields_are_the_defaults():
    assert chat_params(ChatRequest()) == SamplingParams()
    assert completion_params(CompletionRequest()) == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_logprobs_of_a_chat(fields, logprobs):
    assert chat_params(ChatRequest(**fields)).logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
    ],
)
def test_both_names_of_max_tokens(fields, max_tokens):
    assert chat_params(ChatRequest(**fields)).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [pack_int32([1, 2])]),
        ([[1], [2, 3]], [pack_int32([1]), pack_int32([2, 3])]),
    ],
)
def test_four_forms_of_prompts(prompt, prompts):
    assert completion_prompts(prompt, 1) == prompts


def test_the_limit_of_sequences_is_prompts_times_samples():
    assert len(completion_prompts(["x"] * 32, 2)) == 32
    with pytest.raises(RequestError, match="ask for 66 sequences; at most 64"):
        completion_prompts(["x"] * 33, 2)


def test_messages_with_text_parts():
    messages = [
        InputMessage(role="user", content="one"),
        InputMessage(role="user", content=[TextPart(text="two"), TextPart(text="three")]),
        InputMessage(role="user", content=[]),
        InputMessage(role="assistant", content="", tool_calls=[]),
    ]
    assert chat_messages(messages) == [
        ChatMessage(role="user", content="one"),
        ChatMessage(role="user", content="two\nthree"),
        ChatMessage(role="user", content=""),
        ChatMessage(role="assistant", content=""),
    ]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_unsupported_field_is_refused_by_name(kind):
    for name, values in unsupported_fields(kind).items():
        for value in values:
            refuse_unsupported({name: value}, kind)
        with pytest.raises(RequestError, match=f"^{name} is not supported: leave it out") as caught:
            refuse_unsupported({name: {"something": "else"}}, kind)
        assert caught.value.param == name


@pytest.mark.parametrize("choice", [None, "auto", "required"])
def test_tools_are_for_the_template_alone(choice):
    body = {"tools": [{"type": "function"}]}
    refuse_unsupported(body | {"tool_choice": "none"}, ChatRequest)
    with pytest.raises(RequestError, match=r'^tool_choice must be "none" where there are tools'):
        refuse_unsupported(body | {"tool_choice": choice}, ChatRequest)
    with pytest.raises(RequestError, match=r"^tools is not supported"):
        refuse_unsupported(body | {"tool_choice": "none"}, CompletionRequest)


def test_domains_of_the_prefix_cache():
    assert cache_domain(b"key", None) == b"key"
    domains = {cache_domain(key, salt) for key in (b"", b"a", b"b") for salt in (None, "s", "t")}
    assert len(domains) == 9
    assert all(len(domain) <= 64 for domain in domains)

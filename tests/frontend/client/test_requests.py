"""What callers may give, and the sentence for what they may not."""

import re

import pytest

from frontend.client.requests import build_request, build_requests, list_chats, list_prompts
from protocol.columns import pack_int32
from protocol.errors import ErrorCode, RequestError
from protocol.messages import MAX_TEXT_BYTES, ChatMessage, SamplingParams, TextOptions

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (CHAT, [CHAT]),
        ([CHAT, CHAT], [CHAT, CHAT]),
        ([ChatMessage(role="user", content="x")], [[ChatMessage(role="user", content="x")]]),
        (["a", [1], CHAT], ["a", [1], CHAT]),
        ([], []),
        (("a", "b"), ["a", "b"]),
    ],
)
def test_one_prompt_or_several(given, listed):
    assert list_prompts(given) == listed
    assert list_prompts(listed) == listed


def test_each_kind_of_prompt_becomes_its_field():
    text, ids, chat = build_requests(["a", (1, 2), CHAT], None, stream=False)
    assert (text.prompt, text.prompt_ids) == ("a", b"")
    assert (ids.prompt, ids.prompt_ids) == ("", pack_int32([1, 2]))
    assert chat.prompt == [ChatMessage(role="user", content="Hi")]
    assert (text.stream, build_request("a", None, stream=True).stream) == (False, True)


def test_arrays_of_ids_are_prompts():
    import numpy as np

    (request,) = build_requests(list_prompts(np.array([4, 5])), None, stream=False)
    assert request.prompt_ids == pack_int32([4, 5])


def test_parameters_are_for_all_or_one_each():
    one, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert [r.params for r in build_requests(["a", "b"], one, stream=False)] == [one, one]
    assert [r.params for r in build_requests(["a", "b"], [one, two], stream=False)] == [one, two]
    assert build_request("a", None, stream=False).params == SamplingParams()


@pytest.mark.parametrize(
    ("prompts", "params", "param", "sentence"),
    [
        (5, None, "prompts", "prompts is of type int; a prompt is text, a list of token ids"),
        (b"ab", None, "prompts", "is of type bytes"),
        (["a", 5], None, "prompts[1]", "prompts[1] is of type int"),
        (["a", []], None, "prompts[1]", "is empty: give some text, at least one token id"),
        ([[1, "b"]], None, "prompt", "prompt holds a str where a token id is expected"),
        ([1, 2.5], None, "prompt", "holds a float where a token id is expected"),
        ([2**31], None, "prompt", "holds a token id that does not fit 32 bits"),
        ("a\ud800b", None, "prompt", "holds half a surrogate pair at index 1"),
        (["x" * (MAX_TEXT_BYTES + 1)], None, "prompt", "has 8388609 bytes; at most 8388608"),
        (["ä" * (MAX_TEXT_BYTES // 2 + 1)], None, "prompt", "has 8388610 bytes"),
        ([1] * (MAX_TEXT_BYTES // 4 + 1), None, "prompt", "has 8388612 bytes"),
        ([{"role": "user"}], None, "prompt[0]", "has the keys 'role'; a message has 'role' and"),
        ([*CHAT, "x"], None, "prompt[1]", "is of type str, not a chat message"),
        ([{"role": "user", "content": 5}], None, "prompt[0]", "content that is not text"),
        ([{"role": "", "content": "x"}], None, "prompt[0]", "role of 0 characters, not 1 to 64"),
        ([{"role": "user", "content": "\udfff"}], None, "prompt[0]", "half a surrogate pair"),
        (CHAT * 1025, None, "prompt", "has 1025 messages; at most 1024"),
        (
            [{"role": "user", "content": "x" * 5_000_000}] * 2,
            None,
            "prompt",
            "has 10000000 bytes",
        ),
        (["a", "b"], [SamplingParams()], "params", "params has 1 entries for 2 prompts"),
        (["a"], [{"n": 1}], "params[0]", "params[0] is a dict, no SamplingParams"),
        (
            "a",
            SamplingParams(temperature=3),
            "temperature",
            "temperature of params is 3: expected `float` <= 2.0.",
        ),
        ("a", SamplingParams(temperature=float("nan")), "temperature", "is nan: expected"),
        ("a", SamplingParams(max_tokens="5"), "max_tokens", "is '5': expected `int | null`"),
        ("a", SamplingParams(stop="end"), "stop", "is 'end': expected `array`, got `str`"),
        ("a", SamplingParams(stop=["\ud800"]), "stop", "stop of params holds half a surrogate"),
        ("a", SamplingParams(seed=2**64), "seed", "seed of params is 18446744073709551616"),
        (
            ["a", "b"],
            [SamplingParams(), SamplingParams(n=65)],
            "n",
            "n of params[1] is 65: expected `int` <= 64.",
        ),
    ],
)
def test_what_no_engine_could_take_is_named(prompts, params, param, sentence):
    with pytest.raises(RequestError, match=re.escape(sentence)) as caught:
        build_requests(list_prompts(prompts), params, stream=False)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, param)


def test_only_chats_are_chats():
    assert list_chats(CHAT) == [CHAT]
    assert list_chats([CHAT, CHAT]) == [CHAT, CHAT]
    for wrong in ("Hi", ["Hi"], [[1, 2]], [CHAT, []]):
        with pytest.raises(RequestError, match="is no list of chat messages"):
            list_chats(wrong)


def test_text_options_are_every_requests():
    options = {"chat_template_kwargs": {"enable_thinking": False}, "add_special_tokens": False}
    requests = build_requests(["a", CHAT], None, stream=False, text_options=options)
    expected = TextOptions(add_special_tokens=False, variables='{"enable_thinking":false}')
    assert [each.text_options for each in requests] == [expected, expected]
    assert build_request("a", None, stream=True).text_options == TextOptions()


def test_priority_and_deadline_are_every_requests():
    requests = build_requests(["a", [1]], None, stream=False, priority=-2, deadline_s=3)
    assert [(each.priority, each.deadline_s) for each in requests] == [(-2, 3)] * 2
    assert build_request("a", None, stream=True).deadline_s is None


@pytest.mark.parametrize(
    ("turn", "sentence"),
    [
        ({"priority": 2**31}, "priority is 2147483648: expected `int` <= 2147483647."),
        ({"priority": 1.5}, "priority is 1.5: expected `int`, got `float`."),
        ({"deadline_s": 0}, "deadline_s is 0: expected `float` > 0"),
        ({"deadline_s": 604_801}, "deadline_s is 604801: expected `float` <= 604800"),
        ({"deadline_s": float("nan")}, "deadline_s is nan: expected `float`"),
        ({"deadline_s": "5"}, "deadline_s is '5': expected `float | null`, got `str`."),
    ],
)
def test_a_turn_that_cannot_be_is_named(turn, sentence):
    with pytest.raises(RequestError, match=re.escape(sentence)) as caught:
        build_request("a", None, stream=True, **turn)
    assert [caught.value.param] == list(turn)

import json

import msgspec

from frontend.deltas import SampleDelta
from frontend.http.dialects import ChatDialect, CompletionDialect, FinishedChoice, usage_reply
from protocol.messages import FinishReason, Usage

USAGE = Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2)


def delta(text, **fields):
    return SampleDelta(request_id=1, sample=0, first_index=0, text=text, **fields)


def plain(reply):
    content = json.loads(msgspec.json.encode(reply))
    for name in ("id", "created", "model"):
        del content[name]
    return content


def test_the_role_comes_once_for_each_choice():
    dialect = ChatDialect("m", None, None, show_token_ids=False)
    assert not dialect.has_begun(1)
    deltas = [
        plain(dialect.delta(index, delta("x"), None))["choices"][0]["delta"] for index in (1, 0, 1)
    ]
    with_role = {"role": "assistant", "content": "x"}
    assert deltas == [with_role, with_role, {"content": "x"}]
    assert dialect.has_begun(1)


def test_the_echo_comes_once_for_each_choice():
    dialect = CompletionDialect("m", None, None, ["one ", "two "], show_token_ids=False)
    texts = [
        plain(dialect.delta(index, delta("x"), None))["choices"][0]["text"]
        for index in (1, 0, 1, 0)
    ]
    assert texts == ["two x", "one x", "x", "x"]


def test_usage_is_only_written_where_it_is_given():
    for dialect in (
        ChatDialect("m", None, None, show_token_ids=False),
        CompletionDialect("m", None, None, [""], show_token_ids=False),
    ):
        assert "usage" not in plain(dialect.delta(0, delta("x"), None))
        assert plain(dialect.delta(0, delta("x"), USAGE))["usage"]["total_tokens"] == 7
        assert "usage" not in plain(dialect.finish(0, FinishReason.STOP, None))
        last = plain(dialect.usage(USAGE))
        assert last["choices"] == []
        assert last["usage"] == json.loads(msgspec.json.encode(usage_reply(USAGE)))


def test_whole_answers_in_order():
    choices = [
        FinishedChoice(text="a", token_ids=[1], finish_reason=FinishReason.LENGTH),
        FinishedChoice(text="b", token_ids=[2, 3], finish_reason=FinishReason.STOP),
    ]
    chat = plain(ChatDialect("m", None, None, show_token_ids=True).answer(choices, USAGE))
    completion = plain(
        CompletionDialect("m", None, None, ["+", "-"], show_token_ids=True).answer(choices, USAGE)
    )
    assert [choice["message"]["content"] for choice in chat["choices"]] == ["a", "b"]
    assert [choice["text"] for choice in completion["choices"]] == ["+a", "-b"]
    for answer in (chat, completion):
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop"]
        assert [choice["token_ids"] for choice in answer["choices"]] == [[1], [2, 3]]

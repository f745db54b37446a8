import math

import msgspec
import pytest

from frontend.deltas import TokenLogprobs
from frontend.http.logprobs import FLOOR, LogprobWriter


class Letters:
    """Token i spells the i-th of these; two spell the same."""

    spelled = (b"a", b"b", b"\xf0\x9f", b"a", b" long")

    def token_bytes(self, token_id):
        return self.spelled[token_id]


def writer(num_top, **fields):
    return LogprobWriter(Letters(), num_top, **fields)


def test_a_chats_entries():
    entry = TokenLogprobs([1, 0, 2], [-2.0, -0.5, -1.0])
    assert msgspec.to_builtins(writer(2).chat([entry])) == {
        "content": [
            {
                "token": "b",
                "logprob": -2.0,
                "bytes": [98],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "\ufffd", "logprob": -1.0, "bytes": [0xF0, 0x9F]},
                ],
            }
        ]
    }


@pytest.mark.parametrize(
    ("ids", "values"),
    [([0, 1], [-0.5, -1.0]), ([0, 0, 1], [-0.5, -0.5, -1.0])],
    ids=["once", "twice"],
)
def test_the_token_itself_is_shown_once_among_the_likeliest(ids, values):
    (content,) = writer(2).chat([TokenLogprobs(ids, values)]).content
    assert [top.token for top in content.top_logprobs] == ["a", "b"]


def test_without_candidates_only_the_token_is_shown():
    entry = TokenLogprobs([1], [-2.0])
    assert writer(0).chat([entry]).content[0].top_logprobs == []
    assert writer(0).completion([entry]).top_logprobs == [{"b": -2.0}]


def test_a_completions_entries():
    entries = [
        TokenLogprobs([4, 0, 1], [-3.0, -0.5, -1.0]),
        TokenLogprobs([0, 3, 1], [-0.5, -0.75, -1.0]),
    ]
    one = writer(2, text_offset=10)
    logprobs = one.completion(entries)
    assert logprobs.tokens == [" long", "a"]
    assert logprobs.token_logprobs == [-3.0, -0.5]
    assert logprobs.text_offset == [10, 15]
    assert logprobs.top_logprobs == [
        {" long": -3.0, "a": -0.5, "b": -1.0},
        # Two tokens of the same text: the second is known by its id.
        {"a": -0.5, "token_id:3": -0.75},
    ]
    assert one.completion(entries[:1]).text_offset == [16]


def test_the_chosen_value_is_the_largest_exactly_when_it_is_the_likeliest():
    """What lm-eval compares, by equality."""
    value = -0.12345678806304932
    logprobs = writer(1).completion([TokenLogprobs([1, 0], [value, -3.0])])
    assert logprobs.token_logprobs[0] == max(logprobs.top_logprobs[0].values()) == value


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30, -10_000.0])
def test_values_are_finite(value):
    entry = TokenLogprobs([0, 1], [value, -1.0])
    (content,) = writer(2).chat([entry]).content
    assert content.logprob == FLOOR
    assert [top.logprob for top in content.top_logprobs] == [-1.0, FLOOR]
    assert writer(1).completion([entry]).token_logprobs == [FLOOR]
    msgspec.json.decode(msgspec.json.encode(content))


def test_a_prompts_entries():
    first = TokenLogprobs([4], [])
    entries = [first, TokenLogprobs([1, 0, 2], [-2.0, -0.5, -1.0], 1, 7)]
    assert msgspec.to_builtins(writer(2).prompt(entries)) == [
        None,
        {
            "1": {"logprob": -2.0, "rank": 7, "decoded_token": "b"},
            "0": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "2": {"logprob": -1.0, "rank": 2, "decoded_token": "\ufffd"},
        },
    ]
    likely = TokenLogprobs([0, 0, 1], [-0.5, -0.5, -math.inf], 1, 1)
    assert msgspec.to_builtins(writer(2).prompt([likely])) == [
        {
            "0": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "1": {"logprob": FLOOR, "rank": 2, "decoded_token": "b"},
        }
    ]


def test_an_echoed_prompts_tokens_come_first_and_never_go_beyond_it():
    prompt = [TokenLogprobs([4], []), TokenLogprobs([0, 0], [-0.5, -0.5], 1, 1)]
    output = [TokenLogprobs([1], [-2.0])]
    # The echo leaves out the first token, as if it were a BOS.
    assert msgspec.to_builtins(writer(1, text_offset=1).completion(output, prompt)) == {
        "tokens": [" long", "a", "b"],
        "token_logprobs": [None, -0.5, -2.0],
        "top_logprobs": [None, {"a": -0.5}, {"b": -2.0}],
        "text_offset": [0, 1, 1],
    }

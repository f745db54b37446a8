"""Bad words become tokens."""

import asyncio

import pytest

from frontend.bad_words import resolve_bad_words
from frontend.generation import GenerationRequest
from protocol.columns import pack_int32
from protocol.errors import ErrorCode, RequestError
from protocol.messages import SamplingParams


class Letters:
    """A token for each character; refuses digits."""

    async def tokenize(self, text, *, add_special_tokens):
        assert not add_special_tokens
        await asyncio.sleep(0)
        if text.isdigit():
            raise RequestError(ErrorCode.TEXT_FAILED, "Tokenizing the text took too long.")
        return pack_int32(ord(character) for character in text if character != "_")


def resolve(**params):
    request = GenerationRequest(prompt="x", params=SamplingParams(**params))
    return asyncio.run(resolve_bad_words(request, Letters())).params


def test_a_word_counts_at_a_start_and_after_a_space():
    params = resolve(bad_words=["ab", " ab", "c"], bad_word_ids=[[7], [99]], n=2)
    assert params.bad_word_ids == [[7], [99], [97, 98], [32, 97, 98], [32, 99]]
    assert (params.bad_words, params.n) == ([], 2)


def test_nothing_is_asked_without_words():
    assert resolve(bad_word_ids=[[5]]) == SamplingParams(bad_word_ids=[[5]])


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("x" * 32, r"^bad_words holds ' x+', which is 33 tokens; 1 to 32 are possible\.$"),
        ("_", r"^bad_words holds '_', which is 0 tokens; 1 to 32 are possible\.$"),
        ("7", r"^bad_words: Tokenizing the text took too long\.$"),
    ],
)
def test_a_word_that_is_no_few_tokens_is_refused(word, sentence):
    with pytest.raises(RequestError, match=sentence) as refusal:
        resolve(bad_words=["a", word])
    assert refusal.value.param == "bad_words"

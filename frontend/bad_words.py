"""What bad words are in tokens.

A word is banned as its tokens are at the start of a text and as they are after a space, as in vLLM:
a tokenizer mostly has different ones for the two. Where a text spells the word by other tokens,
within a longer word perhaps, nothing bans it.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable
from typing import Protocol

import msgspec

from frontend.generation import GenerationRequest
from protocol.columns import unpack_int32
from protocol.errors import ErrorCode, RequestError
from protocol.messages import MAX_BAD_WORD_TOKENS


class Tokenizer(Protocol):
    """What is asked of the text process."""

    def tokenize(self, text: str, *, add_special_tokens: bool) -> Awaitable[bytes]:
        """Return a text's token ids as an int32 column. Raises RequestError."""
        ...


async def resolve_bad_words(request: GenerationRequest, tokenizer: Tokenizer) -> GenerationRequest:
    """Return a request with its bad words in tokens, each sequence once. Raises RequestError."""
    words = request.params.bad_words
    if not words:
        return request
    spellings = [spelling for word in words for spelling in (word.lstrip(), f" {word.lstrip()}")]
    try:
        columns = await asyncio.gather(
            *(tokenizer.tokenize(text, add_special_tokens=False) for text in spellings)
        )
    except RequestError as error:
        raise RequestError(error.code, f"bad_words: {error.message}", param="bad_words") from error
    sequences = [unpack_int32(column) for column in columns]
    for text, ids in zip(spellings, sequences, strict=True):
        if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"bad_words holds {text!r:.80}, which is {len(ids)} tokens; 1 to "
                f"{MAX_BAD_WORD_TOKENS} are possible.",
                param="bad_words",
            )
    every = {tuple(ids): ids for ids in (*request.params.bad_word_ids, *sequences)}
    params = msgspec.structs.replace(
        request.params, bad_words=[], bad_word_ids=list(every.values())
    )
    return dataclasses.replace(request, params=params)

"""What is asked of the engine, and how open settings are settled. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from frontend.seeds import sample_seed
from protocol.errors import ErrorCode, RequestError
from protocol.messages import (
    MAX_CHAT_MESSAGES,
    MAX_STOP_TOKEN_IDS,
    ChatMessage,
    EngineFacts,
    SamplingParams,
)
from protocol.validation import longest_sequence, validate_sequence

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and what to make of it, from any surface."""

    prompt: str | Sequence[ChatMessage] | bytes
    """Text, a chat, or an int32 column of token ids."""
    params: SamplingParams
    default_max_tokens: int | None = None
    """Where params.max_tokens is None: at most this many. None: the room left."""
    cache_domain: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that is sure to be legal: tokens, and one set of parameters a sample."""

    prompt_ids: bytes
    """An int32 column."""
    params: SamplingParams
    """As asked for."""
    sample_params: list[SamplingParams]
    """As the scheduler gets them."""
    cache_domain: bytes


def check_chat(messages: Sequence[ChatMessage]) -> None:
    """Refuse a chat that no template could render. Raises RequestError."""
    if not messages:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            "messages is empty: give at least one message.",
            param="messages",
        )
    if len(messages) > MAX_CHAT_MESSAGES:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"messages has {len(messages)} entries; at most {MAX_CHAT_MESSAGES} are allowed.",
            param="messages",
        )
    for message in messages:
        if message.role not in ROLES:
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"messages has a role {message.role[:64]!r}; roles are {', '.join(sorted(ROLES))}.",
                param="messages",
            )


def settle(
    request: GenerationRequest,
    prompt_ids: bytes,
    facts: EngineFacts,
    *,
    eos_ids: Sequence[int],
    seed: int,
) -> PreparedRequest:
    """Settle what a request leaves open. Raises RequestError for what this engine cannot do.

    `seed` is for a request that brings none.
    """
    params = request.params
    resolved = msgspec.structs.replace(
        params,
        n=1,
        stop=[],
        seed=seed if params.seed is None else params.seed,
        max_tokens=_max_tokens(request, len(prompt_ids) // 4, longest_sequence(facts)),
        stop_token_ids=_stop_token_ids(params, eos_ids, facts.vocab_size),
        # More than there are is all of them; and the wire holds no number of any size.
        top_k=params.top_k if params.top_k < facts.vocab_size else 0,
    )
    validate_sequence(prompt_ids, resolved, facts)
    return PreparedRequest(
        prompt_ids=prompt_ids,
        params=params,
        sample_params=[
            msgspec.structs.replace(resolved, seed=sample_seed(resolved.seed or 0, sample))
            for sample in range(params.n)
        ],
        cache_domain=request.cache_domain,
    )


def _max_tokens(request: GenerationRequest, prompt_len: int, limit: int) -> int:
    room = limit - prompt_len
    asked = request.params.max_tokens
    if room < 1:
        return 1  # validation refuses the prompt, with its own sentence
    if asked is None:
        return room if request.default_max_tokens is None else min(room, request.default_max_tokens)
    if asked > room:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"The prompt has {prompt_len} tokens and max_tokens is {asked}; this engine holds "
            f"{limit} tokens of prompt and output, so max_tokens may be at most {room}.",
            param="max_tokens",
        )
    return asked


def _stop_token_ids(params: SamplingParams, eos_ids: Sequence[int], vocab_size: int) -> list[int]:
    # A model's files may name an end token that its weights do not have.
    added = [] if params.ignore_eos else [i for i in eos_ids if 0 <= i < vocab_size]
    ids = list(dict.fromkeys([*params.stop_token_ids, *added]))
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"stop_token_ids has {len(params.stop_token_ids)} ids; with the model's own, at most "
            f"{MAX_STOP_TOKEN_IDS} are possible.",
            param="stop_token_ids",
        )
    return ids

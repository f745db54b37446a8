"""What is asked of the engine, and how open settings are settled. No I/O, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from frontend.seeds import sample_seed
from protocol.errors import EngineError, ErrorCode, RequestError
from protocol.messages import (
    MAX_CHAT_MESSAGES,
    MAX_DEADLINE_S,
    MAX_STOP_TOKEN_IDS,
    ChatMessage,
    EngineFacts,
    SamplingDefaults,
    SamplingParams,
    TextOptions,
)
from protocol.sampling import NEUTRAL, sampling
from protocol.validation import longest_sequence, validate_sequence

MAX_PRIORITY = 2**31 - 1
"""The least is -MAX_PRIORITY - 1."""
PLAIN_OPTIONS = TextOptions()
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and what to make of it, from any surface."""

    prompt: str | Sequence[ChatMessage] | bytes
    """Text, a chat, or an int32 column of token ids."""
    params: SamplingParams
    text_options: TextOptions = PLAIN_OPTIONS
    default_max_tokens: int | None = None
    """Where params.max_tokens is None: at most this many. None: what the model's defaults say."""
    cache_domain: bytes = b""
    priority: int = 0
    """Higher runs first."""
    deadline: float | None = None
    """When all samples end at the latest, in seconds on the host's monotonic clock."""


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
    priority: int
    deadline: float | None


class DeadlineError(EngineError):
    """A request's time ran out before the scheduler had it, so nothing has been computed."""


def deadline_after(received: float, seconds: float | None) -> float | None:
    """Return the deadline of a request that came at `received` and has so many seconds.

    None: it has none. Raises RequestError for a time that is none.
    """
    if seconds is None:
        return None
    # Written so that NaN, which compares false with everything, is refused too.
    if not 0 < seconds <= MAX_DEADLINE_S:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"deadline_s is {seconds:g}; it must be above 0 and at most {MAX_DEADLINE_S} seconds.",
            param="deadline_s",
        )
    return received + seconds


def check_priority(priority: int) -> None:
    """Refuse what the scheduler's messages do not hold. Raises RequestError."""
    if not -MAX_PRIORITY - 1 <= priority <= MAX_PRIORITY:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"priority is {priority}; it must be {-MAX_PRIORITY - 1} to {MAX_PRIORITY}.",
            param="priority",
        )


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
    defaults: SamplingDefaults = NEUTRAL,
) -> PreparedRequest:
    """Settle what a request leaves open. Raises RequestError for what this engine cannot do.

    `seed` is for a request that brings none, `defaults` are for what else it leaves open. Of bad
    words the tokens must be known (`frontend.bad_words`).
    """
    params = request.params
    limit = longest_sequence(facts)
    prompt_ids = _truncated(request, prompt_ids, limit, defaults)
    chosen = sampling(params, defaults)
    resolved = msgspec.structs.replace(
        params,
        n=1,
        stop=[],
        seed=seed if params.seed is None else params.seed,
        max_tokens=_max_tokens(request, len(prompt_ids) // 4, limit, defaults),
        truncate_prompt_tokens=None,
        stop_token_ids=_stop_token_ids(params, eos_ids, facts.vocab_size),
        temperature=chosen.temperature,
        # More than there are is all of them; and the wire holds no number of any size.
        top_k=chosen.top_k if chosen.top_k < facts.vocab_size else 0,
        top_p=chosen.top_p,
        min_p=chosen.min_p,
        repetition_penalty=chosen.repetition_penalty,
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
        priority=request.priority,
        deadline=request.deadline,
    )


def _truncated(
    request: GenerationRequest, prompt_ids: bytes, limit: int, defaults: SamplingDefaults
) -> bytes:
    """Return the last tokens of a prompt, as many as the request wants kept."""
    kept = request.params.truncate_prompt_tokens
    if kept is None:
        return prompt_ids
    if kept == -1:
        wanted = request.params.max_tokens or request.default_max_tokens or defaults.max_tokens
        kept = max(1, limit - (wanted or 1))
    return prompt_ids[-4 * kept :]


def _max_tokens(
    request: GenerationRequest, prompt_len: int, limit: int, defaults: SamplingDefaults
) -> int:
    room = limit - prompt_len
    asked = request.params.max_tokens
    if room < 1:
        return 1  # validation refuses the prompt, with its own sentence
    if asked is None:
        return min(room, request.default_max_tokens or defaults.max_tokens or room)
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

"""What a sequence may ask for, checked by one function twice: at the edge, for a good message,
and in the scheduler, which trusts nobody. No I/O, no state.
"""

from collections.abc import Iterable

from protocol.columns import unpack_int32
from protocol.errors import ErrorCode, RequestError
from protocol.messages import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_PROMPT_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    EngineFacts,
    SamplingParams,
)
from protocol.sampling import sampling


def longest_sequence(facts: EngineFacts) -> int:
    """Return the most tokens of prompt and output that one sequence can hold in this engine."""
    return min(facts.max_model_len, facts.num_blocks * facts.block_size)


def validate_prompt(prompt_ids: bytes, facts: EngineFacts) -> None:
    """Check an int32 column of prompt tokens. Raises RequestError."""
    length = len(prompt_ids) // 4
    if length == 0:
        raise _invalid("prompt", "is empty: give at least one token")
    limit = longest_sequence(facts)
    if length >= limit:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"The prompt has {length} tokens; this engine holds {limit} tokens of prompt and "
            f"output, so a prompt may have at most {limit - 1}.",
            param="prompt",
        )
    ids = unpack_int32(prompt_ids)
    worst = min(ids) if min(ids) < 0 else max(ids)
    if not 0 <= worst < facts.vocab_size:
        raise _invalid("prompt", f"holds token id {worst}; ids are 0 to {facts.vocab_size - 1}")


def validate_params(params: SamplingParams, facts: EngineFacts) -> None:
    """Check sampling parameters against their ranges and this model. Raises RequestError."""
    chosen = sampling(params)
    _in_range("temperature", chosen.temperature, 0.0, 2.0)
    _in_range("min_p", chosen.min_p, 0.0, 1.0)
    if not 0.0 < chosen.top_p <= 1.0:
        raise _invalid("top_p", f"is {chosen.top_p}; it must be above 0 and at most 1")
    if chosen.top_k < -1:
        raise _invalid("top_k", f"is {chosen.top_k}; it must be -1 or 0 (off) or positive")
    kept = params.truncate_prompt_tokens
    if kept is not None and (kept < -1 or kept == 0):
        raise _invalid(
            "truncate_prompt_tokens", f"is {kept}; it must be -1 (all that fits) or positive"
        )
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise _invalid("seed", "does not fit 64 bits")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise _invalid("max_tokens", f"is {params.max_tokens}; it must be at least 1")
    if params.min_tokens < 0:
        raise _invalid("min_tokens", f"is {params.min_tokens}; it must not be negative")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _invalid(
            "min_tokens", f"is {params.min_tokens}, more than max_tokens ({params.max_tokens})"
        )
    if not 1 <= params.n <= MAX_SAMPLES:
        raise _invalid("n", f"is {params.n}; it must be 1 to {MAX_SAMPLES}")
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_TOP_LOGPROBS:
        raise _invalid("logprobs", f"is {params.logprobs}; it must be 0 to {MAX_TOP_LOGPROBS}")
    scores = params.prompt_logprobs
    if scores is not None and not 0 <= scores <= MAX_TOP_LOGPROBS:
        raise _invalid("prompt_logprobs", f"is {scores}; it must be 0 to {MAX_TOP_LOGPROBS}")
    _validate_stops(params, facts)
    _in_range("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _in_range("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    if not 0.0 < chosen.repetition_penalty <= 2.0:
        raise _invalid(
            "repetition_penalty",
            f"is {chosen.repetition_penalty}; it must be above 0 and at most 2 (1 is off)",
        )
    _validate_tokens_named(params, facts)


def validate_sequence(prompt_ids: bytes, params: SamplingParams, facts: EngineFacts) -> None:
    """Check what the scheduler is asked to run: prompt and *resolved* parameters."""
    validate_prompt(prompt_ids, facts)
    validate_params(params, facts)
    num_tokens = len(prompt_ids) // 4
    if params.prompt_logprobs is not None:
        num_values = num_tokens * (1 + params.prompt_logprobs)
        if num_values > MAX_PROMPT_LOGPROBS:
            raise _invalid(
                "prompt_logprobs",
                f"ask for {num_values} values: {1 + params.prompt_logprobs} for each of the "
                f"prompt's {num_tokens} tokens; at most {MAX_PROMPT_LOGPROBS} are possible",
            )
    is_open = params.seed is None or params.max_tokens is None
    if is_open or params.stop or params.bad_words or params.truncate_prompt_tokens is not None:
        raise _invalid(
            "params",
            "are not resolved: seed and max_tokens set, no stop strings or bad words, nothing to "
            "be truncated",
        )


def _validate_stops(params: SamplingParams, facts: EngineFacts) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise _invalid("stop", f"has {len(params.stop)} strings; at most {MAX_STOP_STRINGS}")
    if any(not 1 <= len(text.encode()) <= 256 for text in params.stop):
        raise _invalid("stop", "holds a string that is empty or longer than 256 bytes")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _invalid("stop_token_ids", f"has more than {MAX_STOP_TOKEN_IDS} ids")
    _check_ids("stop_token_ids", params.stop_token_ids, facts)


def _validate_tokens_named(params: SamplingParams, facts: EngineFacts) -> None:
    """Check what is said of single tokens: their bias, and whether they may be output."""
    if len(params.logit_bias) > MAX_LOGIT_BIASES:
        raise _invalid(
            "logit_bias", f"has {len(params.logit_bias)} ids; at most {MAX_LOGIT_BIASES}"
        )
    _check_ids("logit_bias", params.logit_bias, facts)
    for token_id, bias in params.logit_bias.items():
        _in_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0, param="logit_bias")
    allowed = params.allowed_token_ids
    if allowed is not None:
        if not 1 <= len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
            raise _invalid(
                "allowed_token_ids", f"has {len(allowed)} ids; 1 to {MAX_ALLOWED_TOKEN_IDS}"
            )
        _check_ids("allowed_token_ids", allowed, facts)
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise _invalid("bad_words", f"has {len(params.bad_words)} words; at most {MAX_BAD_WORDS}")
    if any(not word.strip() or len(word.encode()) > 256 for word in params.bad_words):
        raise _invalid("bad_words", "holds a word that is blank or longer than 256 bytes")
    words = params.bad_word_ids
    if len(words) > MAX_BAD_WORD_IDS:
        raise _invalid(
            "bad_word_ids", f"has {len(words)} sequences of tokens; at most {MAX_BAD_WORD_IDS}"
        )
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise _invalid(
                "bad_word_ids",
                f"holds one of {len(word)} tokens; 1 to {MAX_BAD_WORD_TOKENS} are possible",
            )
        _check_ids("bad_word_ids", word, facts)
    _require_a_token(params, facts)


def _require_a_token(params: SamplingParams, facts: EngineFacts) -> None:
    """Refuse what could leave nothing to draw.

    Every ending of a bad word counts as banned, whether or not its beginning can be output.
    """
    allowed, words = params.allowed_token_ids, params.bad_word_ids
    has_early_stops = params.min_tokens > 0 and bool(params.stop_token_ids)
    if allowed is None and not words and not has_early_stops:
        return
    banned = {word[-1] for word in words}
    if params.min_tokens > 0:
        banned.update(params.stop_token_ids)
    num_left = facts.vocab_size - len(banned) if allowed is None else len(set(allowed) - banned)
    if num_left == 0:
        name = "bad_words" if allowed is None and words else "allowed_token_ids"
        if allowed is None and not words:
            name = "min_tokens"
        raise _invalid(
            name,
            "leaves no token that may be drawn: each one is forbidden by allowed_token_ids, ends a "
            "bad word, or is a stop token before min_tokens",
        )


def _check_ids(name: str, ids: Iterable[int], facts: EngineFacts) -> None:
    for token_id in ids:
        if not 0 <= token_id < facts.vocab_size:
            raise _invalid(name, f"holds {token_id}; ids are 0 to {facts.vocab_size - 1}")


def _in_range(
    name: str, value: float, low: float, high: float, *, param: str | None = None
) -> None:
    # Written so that NaN, which compares false with everything, is refused too.
    if not low <= value <= high:
        raise _invalid(name, f"is {value}; it must be {low:g} to {high:g}", param=param)


def _invalid(name: str, what: str, *, param: str | None = None) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"{name} {what}.", param=param or name)

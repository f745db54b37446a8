"""What a sequence may ask for, checked by one function twice: at the edge, for a good message,
and in the scheduler, which trusts nobody. No I/O, no state.
"""

from protocol.columns import unpack_int32
from protocol.errors import ErrorCode, RequestError
from protocol.messages import (
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
    _validate_stops(params, facts)


def validate_sequence(prompt_ids: bytes, params: SamplingParams, facts: EngineFacts) -> None:
    """Check what the scheduler is asked to run: prompt and *resolved* parameters."""
    validate_prompt(prompt_ids, facts)
    validate_params(params, facts)
    if params.seed is None or params.max_tokens is None or params.stop:
        raise _invalid("params", "are not resolved: seed and max_tokens set, no stop strings")


def _validate_stops(params: SamplingParams, facts: EngineFacts) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise _invalid("stop", f"has {len(params.stop)} strings; at most {MAX_STOP_STRINGS}")
    if any(not 1 <= len(text.encode()) <= 256 for text in params.stop):
        raise _invalid("stop", "holds a string that is empty or longer than 256 bytes")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _invalid("stop_token_ids", f"has more than {MAX_STOP_TOKEN_IDS} ids")
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < facts.vocab_size:
            raise _invalid(
                "stop_token_ids", f"holds {token_id}; ids are 0 to {facts.vocab_size - 1}"
            )


def _in_range(name: str, value: float, low: float, high: float) -> None:
    # Written so that NaN, which compares false with everything, is refused too.
    if not low <= value <= high:
        raise _invalid(name, f"is {value}; it must be {low:g} to {high:g}")


def _invalid(param: str, what: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"{param} {what}.", param=param)

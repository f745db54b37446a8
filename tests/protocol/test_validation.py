"""What a sequence may ask for."""

import msgspec
import pytest

from protocol.columns import pack_int32
from protocol.errors import ErrorCode, RequestError
from protocol.messages import EngineFacts, SamplingParams
from protocol.validation import validate_params, validate_prompt, validate_sequence

FACTS = EngineFacts(
    rank=0, back_end="torch", block_size=4, num_blocks=8, slots=4, max_model_len=100, vocab_size=50
)


@pytest.mark.parametrize("ids", [[0], [49], list(range(31))])
def test_legal_prompts_pass(ids):
    validate_prompt(pack_int32(ids), FACTS)


@pytest.mark.parametrize(
    ("ids", "code", "text"),
    [
        ([], ErrorCode.INVALID_REQUEST, "prompt is empty: give at least one token."),
        ([1, 50], ErrorCode.INVALID_REQUEST, "prompt holds token id 50; ids are 0 to 49."),
        ([-1], ErrorCode.INVALID_REQUEST, "prompt holds token id -1; ids are 0 to 49."),
        (
            [1] * 32,
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            "The prompt has 32 tokens; this engine holds 32",
        ),
    ],
)
def test_illegal_prompts_are_refused(ids, code, text):
    with pytest.raises(RequestError) as refusal:
        validate_prompt(pack_int32(ids), FACTS)
    assert refusal.value.code is code
    assert refusal.value.message.startswith(text)


def test_the_models_context_limits_too():
    facts = msgspec.structs.replace(FACTS, max_model_len=8)
    with pytest.raises(RequestError, match="a prompt may have at most 7"):
        validate_prompt(pack_int32([1] * 8), facts)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("min_p", -1.0),
        ("top_k", -2),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 65),
        ("logprobs", 21),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("stop", [""]),
        ("stop", ["x"] * 5),
        ("stop", ["é" * 129]),
        ("stop_token_ids", [50]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 65),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.1),
        ("repetition_penalty", float("nan")),
        ("logit_bias", {50: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", dict.fromkeys(range(301), 0.0)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [50]),
        ("allowed_token_ids", [1] * 1025),
        ("bad_words", [" "]),
        ("bad_words", ["é" * 129]),
        ("bad_words", ["x"] * 65),
        ("bad_word_ids", [[]]),
        ("bad_word_ids", [[50]]),
        ("bad_word_ids", [[1] * 33]),
        ("bad_word_ids", [[1]] * 129),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(RequestError) as refusal:
        validate_params(msgspec.structs.replace(SamplingParams(), **{field: value}), FACTS)
    assert refusal.value.param == field
    assert refusal.value.message.startswith(field)


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError, match="min_tokens is 5, more than max_tokens"):
        validate_params(SamplingParams(min_tokens=5, max_tokens=4), FACTS)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(max_tokens=1),
        SamplingParams(seed=1, max_tokens=1, stop=["x"]),
    ],
)
def test_the_scheduler_takes_only_resolved_parameters(params):
    with pytest.raises(RequestError, match="not resolved"):
        validate_sequence(pack_int32([1]), params, FACTS)


def test_resolved_parameters_pass():
    validate_sequence(pack_int32([1]), SamplingParams(seed=-5, max_tokens=1), FACTS)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(allowed_token_ids=[1, 2], bad_word_ids=[[1], [3, 2]]), "allowed_token_ids"),
        (
            SamplingParams(allowed_token_ids=[1], stop_token_ids=[1], min_tokens=1),
            "allowed_token_ids",
        ),
        (SamplingParams(bad_word_ids=[[i] for i in range(50)]), "bad_words"),
        (SamplingParams(stop_token_ids=list(range(50)), min_tokens=1), "min_tokens"),
    ],
)
def test_what_leaves_no_token_is_refused(params, name):
    with pytest.raises(RequestError, match="leaves no token that may be drawn") as refusal:
        validate_params(params, FACTS)
    assert refusal.value.param == name


def test_one_token_left_is_enough():
    validate_params(SamplingParams(allowed_token_ids=[1, 2], bad_word_ids=[[1], [2, 1]]), FACTS)
    validate_params(SamplingParams(allowed_token_ids=[1], stop_token_ids=[1]), FACTS)
    validate_params(SamplingParams(stop_token_ids=list(range(49)), min_tokens=1), FACTS)


@pytest.mark.parametrize("given", [{"bad_words": ["x"]}, {"truncate_prompt_tokens": -1}])
def test_what_the_frontend_does_is_done_for_the_scheduler(given):
    params = SamplingParams(seed=1, max_tokens=1, **given)
    with pytest.raises(RequestError, match="params are not resolved"):
        validate_sequence(pack_int32([1]), params, FACTS)


def test_a_prompt_is_scored_as_far_as_an_answer_can_hold_it():
    facts = msgspec.structs.replace(FACTS, max_model_len=1 << 20, num_blocks=1 << 18)
    params = SamplingParams(seed=1, max_tokens=1, prompt_logprobs=3)
    validate_sequence(pack_int32([1] * (1 << 16)), params, facts)
    with pytest.raises(
        RequestError,
        match=r"^prompt_logprobs ask for 262148 values: 4 for each of the prompt's 65537 tokens; "
        r"at most 262144 are possible\.$",
    ):
        validate_sequence(pack_int32([1] * ((1 << 16) + 1)), params, facts)

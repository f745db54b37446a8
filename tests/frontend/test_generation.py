import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.generation import GenerationRequest, check_chat, deadline_after, settle
from protocol.columns import pack_int32, unpack_int32
from protocol.connection import Codec
from protocol.errors import ErrorCode, RequestError
from protocol.messages import (
    AddSequence,
    ChatMessage,
    EngineFacts,
    FrontendToScheduler,
    SamplingDefaults,
    SamplingParams,
)
from protocol.sampling import NEUTRAL
from protocol.validation import validate_params, validate_sequence

FACTS = EngineFacts(
    rank=0,
    back_end="checksum",
    block_size=16,
    num_blocks=4,
    slots=2,
    max_model_len=100,
    vocab_size=50,
)
PROMPT = pack_int32([1, 2, 3])


def settled(*, prompt=PROMPT, default=None, eos_ids=(2,), defaults=NEUTRAL, **params):
    request = GenerationRequest(
        prompt=prompt, params=SamplingParams(**params), default_max_tokens=default
    )
    return settle(request, prompt, FACTS, eos_ids=eos_ids, seed=77, defaults=defaults)


def test_what_is_open_is_settled():
    prepared = settled(n=3, stop=["x"], top_k=5)
    first, second, third = prepared.sample_params
    assert (first.n, first.stop, first.seed, first.top_k) == (1, [], 77, 5)
    # Four blocks of 16 hold less than the model could.
    assert first.max_tokens == 64 - 3
    assert first.stop_token_ids == [2]
    assert len({first.seed, second.seed, third.seed}) == 3
    assert prepared.params.stop == ["x"]


@pytest.mark.parametrize(
    ("asked", "default", "max_tokens"),
    [(None, None, 61), (None, 16, 16), (None, 100, 61), (5, 16, 5), (61, None, 61)],
)
def test_max_tokens(asked, default, max_tokens):
    prepared = settled(max_tokens=asked, default=default)
    assert prepared.sample_params[0].max_tokens == max_tokens


def test_what_a_request_leaves_open_the_models_defaults_settle():
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, max_tokens=7)
    defaults = msgspec.structs.replace(defaults, repetition_penalty=1.2)
    (one,) = settled(defaults=defaults).sample_params
    assert (one.temperature, one.top_k, one.top_p, one.min_p) == (0.6, 20, 0.95, 0.1)
    assert one.repetition_penalty == 1.2
    assert one.max_tokens == 7
    (other,) = settled(
        defaults=defaults, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=9
    ).sample_params
    assert (other.temperature, other.top_k, other.top_p, other.min_p) == (0.0, 0, 1.0, 0.0)
    assert other.max_tokens == 9
    (neutral,) = settled().sample_params
    assert (neutral.temperature, neutral.top_k, neutral.top_p, neutral.min_p) == (1.0, 0, 1.0, 0.0)
    # The endpoint's own default of max_tokens comes before the model's, and room before both.
    assert settled(defaults=defaults, default=3).sample_params[0].max_tokens == 3
    roomy = SamplingDefaults(max_tokens=1000)
    assert settled(defaults=roomy).sample_params[0].max_tokens == 61


def test_more_than_the_room_left_is_refused_with_both_numbers():
    with pytest.raises(RequestError) as caught:
        settled(max_tokens=62)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert caught.value.message == (
        "The prompt has 3 tokens and max_tokens is 62; this engine holds 64 tokens of prompt and "
        "output, so max_tokens may be at most 61."
    )


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_a_prompt_without_room_for_one_token_is_refused(length):
    with pytest.raises(RequestError) as caught:
        settled(prompt=pack_int32([1] * length))
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert f"has {length} tokens" in caught.value.message
    assert "at most 63" in caught.value.message


@pytest.mark.parametrize(
    ("params", "eos_ids", "stop_token_ids"),
    [
        ({}, [2, 7], [2, 7]),
        ({"ignore_eos": True}, [2], []),
        ({"stop_token_ids": [7, 2]}, [2], [7, 2]),
        ({"stop_token_ids": [9], "ignore_eos": True}, [2], [9]),
        ({}, [50, -1, 3], [3]),
    ],
)
def test_the_models_end_tokens_are_added(params, eos_ids, stop_token_ids):
    assert settled(eos_ids=eos_ids, **params).sample_params[0].stop_token_ids == stop_token_ids


def test_too_many_end_tokens_are_refused():
    facts = msgspec.structs.replace(FACTS, vocab_size=1000)
    request = GenerationRequest(
        prompt=PROMPT, params=SamplingParams(stop_token_ids=[*range(100, 163)])
    )
    settle(request, PROMPT, facts, eos_ids=[2], seed=0)
    with pytest.raises(
        RequestError, match="has 63 ids; with the model's own, at most 64"
    ) as caught:
        settle(request, PROMPT, facts, eos_ids=[2, 3], seed=0)
    assert caught.value.param == "stop_token_ids"


def test_a_large_top_k_keeps_everything():
    assert settled(top_k=50).sample_params[0].top_k == 0
    assert settled(top_k=2**40).sample_params[0].top_k == 0
    assert settled(top_k=49).sample_params[0].top_k == 49


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "messages is empty"),
        ([ChatMessage(role="robot", content="x")], "has a role 'robot'; roles are assistant, "),
    ],
)
def test_a_chat_that_no_template_could_render(messages, sentence):
    with pytest.raises(RequestError, match=sentence):
        check_chat(messages)


anything = st.integers() | st.integers(-3, 70) | st.integers(2**31 - 2, 2**31 + 2)


@settings(max_examples=500, deadline=None)
@given(
    temperature=st.none() | st.floats() | st.floats(0, 2),
    top_k=st.none() | anything,
    top_p=st.none() | st.floats() | st.floats(0, 1),
    min_p=st.none() | st.floats() | st.floats(0, 1),
    seed=st.none() | st.integers() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | anything,
    min_tokens=anything,
    n=st.integers(-1, 66),
    stop=st.lists(st.text(max_size=3) | st.text(min_size=200, max_size=300), max_size=6),
    stop_token_ids=st.lists(anything, max_size=4),
    logprobs=st.none() | st.integers(-2, 25),
    presence_penalty=st.just(0.0) | st.floats(),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    repetition_penalty=st.none() | st.floats() | st.floats(0, 2),
    logit_bias=st.just({}) | st.dictionaries(anything, st.floats(-101, 101), max_size=3),
    allowed_token_ids=st.none() | st.lists(anything, max_size=3),
    bad_word_ids=st.just([]) | st.lists(st.lists(anything, max_size=34), max_size=3),
    prompt=st.lists(st.integers(-1, 51), max_size=70),
)
def test_what_is_accepted_is_legal_on_the_wire(prompt, **fields):
    """One request that breaks the wire would end the connection, and with it all the others."""
    params = SamplingParams(**fields)
    request = GenerationRequest(prompt=pack_int32(prompt), params=params)
    try:
        validate_params(params, FACTS)
        prepared = settle(request, pack_int32(prompt), FACTS, eos_ids=[2], seed=1)
    except RequestError:
        return
    codec = Codec(FrontendToScheduler)
    for sample, resolved in enumerate(prepared.sample_params):
        sent = AddSequence(
            request_id=1, sample=sample, prompt_ids=prepared.prompt_ids, params=resolved
        )
        received = codec.decode(msgspec.msgpack.encode(sent))
        validate_sequence(received.prompt_ids, received.params, FACTS)


def test_a_chat_of_too_many_messages_is_refused():
    messages = [ChatMessage(role="user", content="x")] * 1025
    with pytest.raises(RequestError, match="messages has 1025 entries; at most 1024 are allowed"):
        check_chat(messages)


@pytest.mark.parametrize("seconds", [0, -1, 604_801, float("nan"), float("inf")])
def test_a_time_limit_that_is_none_is_refused(seconds):
    with pytest.raises(
        RequestError, match=r"must be above 0 and at most 604800 seconds\."
    ) as caught:
        deadline_after(5.0, seconds)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "deadline_s")


def test_a_deadline_counts_from_the_receipt():
    assert deadline_after(5.0, None) is None
    assert deadline_after(5.0, 0.25) == 5.25


@pytest.mark.parametrize(
    ("kept", "asked", "default", "length"),
    [
        (None, 4, None, 40),
        (7, 4, None, 7),
        (50, 4, None, 40),
        (-1, 30, None, 34),
        (-1, 4, None, 40),
        (-1, None, 30, 34),
    ],
)
def test_a_prompt_keeps_its_end(kept, asked, default, length):
    prompt = pack_int32(range(40))
    prepared = settled(
        prompt=prompt, default=default, max_tokens=asked, truncate_prompt_tokens=kept
    )
    assert unpack_int32(prepared.prompt_ids) == list(range(40 - length, 40))
    assert prepared.sample_params[0].truncate_prompt_tokens is None


def test_a_prompt_longer_than_the_context_can_be_cut_to_it():
    prompt = pack_int32(i % 50 for i in range(500))
    kept = settled(prompt=prompt, truncate_prompt_tokens=-1, max_tokens=None)
    assert (len(kept.prompt_ids) // 4, kept.sample_params[0].max_tokens) == (63, 1)
    by_model = settled(
        prompt=prompt, truncate_prompt_tokens=-1, defaults=SamplingDefaults(max_tokens=20)
    )
    assert (len(by_model.prompt_ids) // 4, by_model.sample_params[0].max_tokens) == (44, 20)
    with pytest.raises(RequestError, match="has 64 tokens"):
        settled(prompt=prompt, truncate_prompt_tokens=64)

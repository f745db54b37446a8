import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.deltas import TokenLogprobs
from frontend.detokenizer import ByteLevelDetokenizer
from frontend.output_text import OutputText
from frontend.sample import FAILURES, Sample, failure
from frontend.stop_strings import StopStrings
from protocol.columns import pack_int32, unpack_int32
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import AddSequence, FinishReason, SamplingParams

PIECES = {token_id: b"%c" % (97 + token_id) for token_id in range(26)} | {26: b"\xf0\x9f"}
EOS = 25


def make_sample(*stops, keeps_stop_token=False, **params):
    sequence = AddSequence(
        request_id=8,
        sample=1,
        prompt_ids=pack_int32([9]),
        params=SamplingParams(stop_token_ids=[EOS], **params),
    )
    scanner = StopStrings(stops, keep=False).scanner() if stops else None
    text = OutputText(ByteLevelDetokenizer(PIECES), scanner, min_tokens=0)
    return Sample(sequence, text, keeps_stop_token=keeps_stop_token)


def test_tokens_become_deltas():
    sample = make_sample()
    first = sample.accept(0, [0, 1], [], 0)
    second = sample.accept(2, [2], [], 0)
    assert (first.delta.text, second.delta.text) == ("ab", "c")
    assert (first.delta.first_index, second.delta.first_index) == (0, 2)
    assert (first.delta.request_id, first.delta.sample) == (8, 1)
    assert list(sample.output_ids) == [0, 1, 2]
    assert not sample.is_finished


def test_tokens_seen_before_are_dropped():
    sample = make_sample()
    entries = [TokenLogprobs([i], [-1.0]) for i in range(4)]
    sample.accept(0, [0, 1], entries[:2], 0)
    assert sample.accept(0, [0, 1], entries[:2], 0) is None
    overlap = sample.accept(1, [1, 2, 3], entries[1:], 0)
    assert (overlap.delta.text, overlap.delta.token_ids) == ("cd", [2, 3])
    assert overlap.delta.logprobs == entries[2:]
    assert overlap.delta.first_index == 2


def test_a_gap_is_an_error():
    sample = make_sample()
    with pytest.raises(ProtocolError, match="Tokens from index 1 came after 0 tokens"):
        sample.accept(1, [1], [], 0)


def test_a_row_that_says_nothing_is_nothing():
    assert make_sample().accept(0, [], [], 0) is None


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.TIMEOUT])
def test_the_schedulers_end_is_the_samples(reason):
    sample = make_sample()
    accepted = sample.accept(0, [0, 26], [], reason)
    assert accepted.delta.text == "a\ufffd"
    assert accepted.delta.finish_reason is reason
    assert accepted.delta.is_last
    assert not accepted.must_abort
    assert sample.is_finished
    assert sample.accept(2, [1], [], FinishReason.STOP) is None


def test_an_end_can_come_without_tokens():
    sample = make_sample()
    sample.accept(0, [0], [], 0)
    accepted = sample.accept(1, [], [], FinishReason.LENGTH)
    assert (accepted.delta.text, accepted.delta.finish_reason) == ("", FinishReason.LENGTH)


@pytest.mark.parametrize(("keeps", "text"), [(False, "a"), (True, "az")])
def test_the_text_of_a_final_stop_token_is_left_out_unless_asked_for(keeps, text):
    accepted = make_sample(keeps_stop_token=keeps).accept(0, [0, EOS], [], FinishReason.STOP)
    assert accepted.delta.text == text
    assert accepted.delta.token_ids == [0, EOS]


def test_a_stop_token_that_ended_nothing_is_text():
    sample = make_sample()
    assert sample.accept(0, [EOS, 0], [], FinishReason.LENGTH).delta.text == "za"


def test_a_stop_string_ends_the_sample_here():
    sample = make_sample("cd")
    entries = [TokenLogprobs([i], [-1.0]) for i in range(6)]
    accepted = sample.accept(0, [0, 1, 2, 3, 4, 5], entries, 0)
    assert accepted.must_abort
    assert accepted.delta.text == "ab"
    assert accepted.delta.token_ids == [0, 1, 2, 3]
    assert accepted.delta.logprobs == entries[:4]
    assert accepted.delta.finish_reason is FinishReason.STOP
    assert list(sample.output_ids) == [0, 1, 2, 3]
    assert sample.accept(6, [1], [], FinishReason.LENGTH) is None


def test_a_stop_string_with_the_schedulers_own_end_needs_no_abort():
    accepted = make_sample("cd").accept(0, [2, 3], [], FinishReason.LENGTH)
    assert accepted.delta.finish_reason is FinishReason.STOP
    assert not accepted.must_abort


@pytest.mark.parametrize("code", ErrorCode)
def test_errors_have_sentences(code):
    accepted = make_sample().accept(0, [0], [], int(code))
    assert accepted.delta.error.code is code
    assert accepted.delta.error.message == FAILURES[code]
    assert accepted.delta.finish_reason is None


def test_an_unknown_reason_is_an_internal_error():
    assert failure(999).code is ErrorCode.INTERNAL


def test_a_sample_is_resumed_from_what_it_has_seen():
    sample = make_sample()
    sample.accept(0, [0, 1, 2], [], 0)
    resumed = sample.resumed()
    assert unpack_int32(resumed.resume_ids) == [0, 1, 2]
    assert resumed.next_index == 3
    assert resumed.params == sample.sequence.params


def test_a_sample_can_be_ended_from_here():
    sample = make_sample("bcd")
    assert sample.accept(0, [0, 1, 2], [], 0).delta.text == "a"
    delta = sample.end(failure(ErrorCode.NOT_READY))
    assert (delta.text, delta.first_index, delta.is_last) == ("bc", 3, True)
    assert sample.accept(3, [3], [], 0) is None


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 25), min_size=1, max_size=20),
    pieces=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=15),
    stop=st.sampled_from(["", "ab", "zz", "c"]),
)
def test_repeated_and_overlapping_rows_change_nothing(ids, pieces, stop):
    def run(rows):
        sample = make_sample(*([stop] if stop else []))
        text, tokens, end = "", [], None
        for first, row, reason in rows:
            known = len(sample.output_ids)
            if first > known and not sample.is_finished:
                continue
            accepted = sample.accept(min(first, known), row, [], reason) if first <= known else None
            if accepted:
                assert end is None
                text += accepted.delta.text
                tokens += accepted.delta.token_ids
                end = accepted.delta.finish_reason
        return text, tokens, end

    plain = [(place, ids[place : place + 1], 0) for place in range(len(ids))]
    last = [(len(ids), [], FinishReason.LENGTH)]
    noisy = []
    for place, row in enumerate(plain):
        noisy += [
            (first, ids[first : min(first + size, place)], 0)
            for first, size in pieces
            if first <= place
        ]
        noisy.append(row)
    assert run(noisy + last) == run(plain + last)


def scored(*positions):
    return [TokenLogprobs([position], [-1.0], position, 1) for position in positions]


def test_a_prompts_log_probabilities_come_with_the_first_output():
    sample = make_sample(prompt_logprobs=0)
    sample.learn_prompt_logprobs(scored(1, 2))
    assert sample.resumed().params.prompt_logprobs == 0
    # A scheduler that starts again sends them again.
    sample.learn_prompt_logprobs(scored(1, 2, 3))
    assert sample.accept(0, [], [], 0) is None
    first = sample.accept(0, [0], [], 0).delta
    assert first.prompt_logprobs == [TokenLogprobs([9], []), *scored(1, 2, 3)]
    assert sample.accept(1, [1], [], 0).delta.prompt_logprobs == []
    assert sample.resumed().params.prompt_logprobs is None


def test_a_gap_in_a_prompts_log_probabilities_is_an_error():
    sample = make_sample(prompt_logprobs=0)
    sample.learn_prompt_logprobs(scored(1))
    with pytest.raises(ProtocolError, match="of prompt token 3 came after those of 2 tokens"):
        sample.learn_prompt_logprobs(scored(3))

from array import array

import pytest

from protocol.messages import FinishReason, SamplingParams
from scheduler.prefix import PrefixChain, PrefixHasher
from scheduler.sequence import (
    RUNNING,
    STORY_LENGTH,
    TRANSITIONS,
    Sequence,
    SequenceKey,
    SequenceStatus,
)


def sequence(tokens=(1, 2, 3), *, prompt=3, max_tokens=10, stop=(), min_tokens=0):
    return Sequence(
        key=SequenceKey(b"frontend", 7, 1),
        tokens=array("i", tokens),
        num_prompt_tokens=prompt,
        max_tokens=max_tokens,
        params=SamplingParams(seed=0, max_tokens=8, min_tokens=min_tokens),
        stop_token_ids=frozenset(stop),
        chain=PrefixChain(PrefixHasher(b""), b"", 4),
        arrival=0,
    )


def test_every_status_has_its_transitions_and_all_but_the_end_lead_to_it():
    assert set(TRANSITIONS) == set(SequenceStatus)
    for status, successors in TRANSITIONS.items():
        assert (SequenceStatus.FINISHED in successors) == (status is not SequenceStatus.FINISHED)


def test_only_a_sequence_that_waits_can_start_to_run():
    starts = {status for status in TRANSITIONS if TRANSITIONS[status] & RUNNING} - RUNNING
    assert starts == {SequenceStatus.WAITING, SequenceStatus.PREEMPTED}


def test_what_is_drained_is_not_preempted():
    assert SequenceStatus.PREEMPTED not in TRANSITIONS[SequenceStatus.DRAINING]


def test_an_illegal_change_tells_the_story():
    one = sequence()
    one.become(SequenceStatus.PREFILLING, 4)
    one.note("chunk[0:3]", 4)
    one.become(SequenceStatus.FINISHED, 5)
    with pytest.raises(AssertionError) as caught:
        one.become(SequenceStatus.DECODING, 6)
    assert str(caught.value) == (
        "a sequence cannot go from finished to decoding: request=7 sample=1 status=finished "
        "slot=None story=[prefilling(step=4 tokens=3 blocks=0), "
        "chunk[0:3](step=4 tokens=3 blocks=0), finished(step=5 tokens=3 blocks=0)]"
    )


def test_the_story_is_bounded():
    one = sequence()
    for step in range(100):
        one.note("event", step)
    assert [event.step_id for event in one.story] == list(range(100 - STORY_LENGTH, 100))


@pytest.mark.parametrize(
    ("tokens", "stop", "min_tokens", "reason"),
    [
        ((1, 2, 3, 9), (), 0, None),
        ((1, 2, 3, 9), (9,), 0, FinishReason.STOP),
        ((1, 2, 3, 9), (8,), 0, None),
        ((1, 2, 3, 9), (9,), 1, FinishReason.STOP),
        ((1, 2, 3, 9), (9,), 2, None),
        ((1, 2, 3, *range(10, 17)), (), 0, FinishReason.LENGTH),
        ((1, 2, 3, *range(10, 17)), (16,), 0, FinishReason.STOP),
    ],
)
def test_a_sequence_ends_at_a_stop_token_or_its_length(tokens, stop, min_tokens, reason):
    assert sequence(tokens, stop=stop, min_tokens=min_tokens).natural_end() is reason


def test_sequences_are_compared_by_identity():
    assert sequence() != sequence()
    assert len({sequence(), sequence()}) == 2


def test_what_is_pending_is_what_is_not_planned():
    one = sequence((1, 2, 3, 4, 5))
    assert (one.num_pending, one.num_output_tokens) == (5, 2)
    one.num_planned = 4
    assert one.num_pending == 1

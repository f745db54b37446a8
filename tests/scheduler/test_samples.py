from scheduler.samples import Samples, length_in_common
from tests.scheduler.simulation import make_sequence


def make_sample(sample, num_tokens=8, *, num_computed=0, blocks=2, request_id=0):
    sequence = make_sequence(0, num_tokens, sample=sample, request_id=request_id)
    sequence.num_computed = num_computed
    sequence.block_table = list(range(blocks))
    return sequence


def entered(*sequences):
    samples = Samples()
    for sequence in sequences:
        samples.enter(sequence)
    return samples


def test_the_first_that_has_computed_the_prompt_comes_before_those_about_to():
    first, second, third = make_sample(0), make_sample(1, num_computed=7), make_sample(2)
    asking = make_sample(3)
    assert entered(first, second, third).find(asking) is second
    assert entered(first, third).find(asking) is first
    assert entered().find(asking) is None


def test_who_has_left_or_has_no_blocks_is_not_found():
    first, second = make_sample(0, num_computed=8), make_sample(1, num_computed=8, blocks=0)
    samples = entered(first, second)
    samples.leave(first)
    assert samples.find(make_sample(2)) is None
    samples.leave(second)
    assert samples.find(make_sample(2)) is None


def test_who_was_never_noted_can_leave():
    first, second = make_sample(0, num_computed=8), make_sample(1, num_computed=8)
    samples = entered(first)
    samples.leave(second)
    assert samples.find(make_sample(2)) is first
    samples.leave(first)
    samples.leave(first)
    assert samples.find(make_sample(2)) is None


def test_another_request_or_another_prompt_is_not_found():
    samples = entered(make_sample(0, num_computed=8), make_sample(0, 8, request_id=1))
    changed = make_sample(1)
    changed.tokens[3] = 99
    assert samples.find(changed) is None
    changed.tokens[3], changed.tokens[7] = 3, 99  # the last one it computes itself
    assert samples.find(changed) is not None
    assert samples.find(make_sample(1, request_id=2)) is None


def test_in_common_is_the_prompt_but_for_one_token_to_compute():
    sequence = make_sample(0)
    assert length_in_common(sequence) == 7
    sequence.tokens.append(5)
    assert length_in_common(sequence) == 8
    sequence.tokens.append(5)
    assert length_in_common(sequence) == 8

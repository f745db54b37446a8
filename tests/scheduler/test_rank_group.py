import pytest

from protocol.errors import ProcessError, ProtocolError
from protocol.messages import StepResult
from scheduler.rank_group import Answered, RankGroup


def result(step_id, digest=7):
    return StepResult(step_id=step_id, digest=digest)


def group(num_ranks, *step_ids):
    one = RankGroup(num_ranks, 30.0)
    for step_id in step_ids:
        one.sent(step_id, now=100.0, prompt_tokens=0)
    return one


def test_a_step_is_answered_when_every_rank_has_answered():
    ranks = group(3, 1)
    mine = result(1)
    assert ranks.receive(2, result(1), 101.0) == []
    assert ranks.receive(0, mine, 101.0) == []
    assert ranks.receive(1, result(1), 101.5) == [Answered(mine, 1.5)]


def test_answers_come_in_step_order_and_are_rank_0s():
    ranks = group(2, 1, 2)
    mine = [result(1), result(2)]
    for each in mine:
        assert ranks.receive(0, each, 101.0) == []
    # The second began when the first was answered.
    answered = [ranks.receive(1, result(step), 100.5 + step) for step in (1, 2)]
    assert answered == [[Answered(mine[0], 1.5)], [Answered(mine[1], 1.0)]]


def test_a_repeated_result_is_ignored():
    ranks = group(2, 1)
    ranks.receive(1, result(1), 101.0)
    assert ranks.receive(1, result(1), 102.0) == []
    ranks.receive(0, result(1), 103.0)
    assert ranks.receive(0, result(1), 104.0) == []


@pytest.mark.parametrize("step_id", [2, 3])
def test_a_result_out_of_order_is_the_ranks_fault(step_id):
    ranks = group(2, 1, 2)
    with pytest.raises(ProtocolError, match=f"Rank 1 answers step {step_id} where step 1 is"):
        ranks.receive(1, result(step_id), 101.0)


def test_a_result_of_a_step_that_was_not_sent_is_the_ranks_fault():
    with pytest.raises(ProtocolError, match="Rank 0 answers step 1"):
        group(2).receive(0, result(1), 101.0)


def test_ranks_that_disagree_are_named():
    ranks = group(4, 1)
    ranks.receive(0, result(1, 0xA), 101.0)
    ranks.receive(1, result(1, 0xB), 101.0)
    ranks.receive(2, result(1, 0xA), 101.0)
    with pytest.raises(ProcessError) as caught:
        ranks.receive(3, result(1, 0xA), 101.0)
    assert str(caught.value) == (
        "The ranks disagree about step 1: ranks 0, 2, 3 (0x0000000a) and rank 1 (0x0000000b) have "
        "different digests of plans and tokens."
    )


def test_a_late_step_names_itself_and_the_missing_ranks():
    ranks = group(3, 1)
    ranks.receive(1, result(1), 110.0)
    assert ranks.deadline() == 130.0
    ranks.check(129.9)
    with pytest.raises(ProcessError) as caught:
        ranks.check(130.0)
    assert str(caught.value) == (
        "Step 1 has no answer of ranks 0, 2 after 30.0 s; with 0 prompt tokens it may take 30.0 s "
        "(--step-timeout 30)."
    )


def test_a_step_has_the_timeout_once_more_for_every_1024_prompt_tokens():
    ranks = group(1)
    ranks.sent(1, 100.0, prompt_tokens=16_384)
    ranks.sent(2, 100.0, prompt_tokens=512)
    assert ranks.deadline() == 100.0 + 17 * 30.0
    ranks.check(609.0)
    ranks.receive(0, result(1), 300.0)
    assert ranks.deadline() == 345.0
    with pytest.raises(ProcessError, match=r"with 512 prompt tokens it may take 45\.0 s"):
        ranks.check(345.0)


def test_a_plan_behind_another_has_its_own_time():
    ranks = group(1, 1, 2)
    ranks.receive(0, result(1), 125.0)
    assert ranks.deadline() == 155.0
    ranks.receive(0, result(2), 126.0)
    assert ranks.deadline() is None
    ranks.check(1000.0)
    ranks.sent(3, 200.0, prompt_tokens=0)
    assert ranks.deadline() == 230.0

import shutil
import tempfile
import time
from pathlib import Path

import pytest
import zmq

from protocol.errors import ProcessError
from protocol.messages import Hello, Reset, Role, StepPlan, StepResult
from protocol.run_dir import RunDir
from scheduler.ranks import Ranks
from tests.scheduler.process_driver import PATIENCE_S, FakeRank
from tests.scheduler.simulation import facts


@pytest.fixture
def group():
    """Two ranks' sockets in the scheduler, and the ranks."""
    path = Path(tempfile.mkdtemp(prefix="tw"))
    names, context = RunDir(str(path)), zmq.Context()
    ranks = Ranks(context, names, 2, 30.0, epoch=5)
    peers = []
    for number, num_blocks in enumerate([9, 7]):
        own = facts(num_blocks=num_blocks, block_size=4, rank=number)
        peers.append(FakeRank(context, names, own))
    yield ranks, peers
    for closing in (*peers, *ranks.dealers):
        getattr(closing, "dealer", closing).close()
    context.destroy(linger=0)
    shutil.rmtree(path)


def receive_until(ranks, condition):
    """Let the ranks' messages in until something holds; return rank 0's answered results."""
    results, deadline = [], time.monotonic() + PATIENCE_S
    while True:
        results += ranks.receive(100.0)
        if condition(results):
            return results
        assert time.monotonic() < deadline
        time.sleep(0.005)


def meet(ranks, peers):
    for peer in peers:
        peer.hello()
    receive_until(ranks, lambda _: not ranks.missing())
    ranks.greet(Hello(role=Role.SCHEDULER, identity=b"s", epoch=5))
    for peer in peers:
        assert peer.receive(Hello).fingerprint == "f" * 64


def test_the_groups_facts_are_rank_0s_with_the_fewest_blocks(group):
    ranks, peers = group
    assert ranks.missing() == [0, 1]
    peers[1].hello()
    receive_until(ranks, lambda _: ranks.missing() == [0])
    meet(ranks, peers)
    assert ranks.facts() == facts(num_blocks=7, block_size=4)


def test_every_rank_gets_the_same_frame_and_all_answer(group):
    ranks, peers = group
    meet(ranks, peers)
    assert ranks.deadline() is None
    ranks.send(StepPlan(step_id=1, decode=b""), 100.0)
    assert ranks.deadline() == 130.0
    plans = [peer.receive(StepPlan) for peer in peers]
    assert plans[0] == plans[1]
    assert plans[0].seq == 1
    for peer in peers:
        peer.connection.send(StepResult(step_id=1, digest=3))
    ((result, seconds),) = receive_until(ranks, bool)
    assert seconds == 0.0
    assert result.step_id == 1
    assert ranks.deadline() is None
    ranks.check(1e9)


def test_a_lost_plan_is_sent_again(group):
    ranks, peers = group
    meet(ranks, peers)
    ranks.send(StepPlan(step_id=1, decode=b""), 100.0)
    peers[0].receive(StepPlan)
    peers[0].connection._received = 0  # as if it had not come
    ranks.send(StepPlan(step_id=2, decode=b""), 100.0)
    peers[0].collect(1.0)
    assert not peers[0].pending
    deadline = time.monotonic() + PATIENCE_S
    while len(peers[0].pending) < 2 and time.monotonic() < deadline:
        ranks.receive(100.0)
        peers[0].collect(0.05)
    assert [plan.step_id for plan in peers[0].pending] == [1, 2]


@pytest.mark.parametrize("breach", ["hello", "reset"])
def test_a_rank_that_has_lost_its_state_ends_the_run(group, breach):
    ranks, peers = group
    meet(ranks, peers)
    if breach == "hello":
        peers[1].hello()
    else:
        peers[1].connection.send(Reset())
    with pytest.raises(ProcessError, match=r"Rank 1 has (restarted|lost track)"):
        receive_until(ranks, lambda _: False)


def test_a_late_step_is_noticed(group):
    ranks, peers = group
    meet(ranks, peers)
    ranks.send(StepPlan(step_id=1, decode=b""), 100.0)
    ranks.check(129.0)
    with pytest.raises(ProcessError, match="Step 1 has no answer of ranks 0, 1"):
        ranks.check(131.0)

"""What a waiting client does as time passes, without a clock."""

import pytest

from frontend.client.errors import EngineGoneError
from frontend.client.pulse import RETRY_INTERVAL_S, Pulse
from frontend.client.session import Session
from protocol.errors import ErrorCode
from protocol.messages import ErrorInfo, Generate, Output, SamplingParams, Status


class Watched:
    """A greeted session and its pulse, from second 100 on; its silence limit is 60 s."""

    def __init__(self, frontend, *, greeted=True):
        self.frontend = frontend
        self.session = Session("ipc://x", frontend.hear, window=4)
        self.session.greet(b"me", lambda _: None)
        if greeted:
            self.session.receive(frontend.hello())
        self.pulse = Pulse(self.session, silence_limit_s=60.0, now=100.0)
        frontend.take()

    def sent(self):
        return [type(message) for message in self.frontend.take()]


@pytest.fixture
def watched(frontend_side):
    return Watched(frontend_side())


def test_silence_is_probed_and_then_counts_as_the_engines_end(watched):
    for now in range(100, 160):
        assert 0 < watched.pulse.beat(float(now)) <= 10
        assert watched.session.failure is None
    assert watched.sent() == [Status] * 5
    watched.pulse.beat(160.0)
    assert isinstance(watched.session.failure, EngineGoneError)
    assert "has answered nothing for 60 s" in str(watched.session.failure)


def test_an_engine_that_says_something_is_not_asked(watched):
    for now in range(100, 300):
        watched.pulse.heard(float(now))
        assert watched.pulse.beat(float(now)) == 10
    assert watched.sent() == []
    assert watched.session.failure is None


def test_time_in_which_nobody_waited_is_no_silence(watched):
    watched.pulse.beat(101.0)
    assert watched.pulse.beat(1000.0) == 10
    assert watched.sent() == []
    assert watched.session.failure is None


def test_before_hello_nothing_is_asked_and_nothing_is_late(frontend_side):
    watched = Watched(frontend_side(), greeted=False)
    for now in range(100, 300):
        watched.pulse.beat(float(now))
    assert watched.sent() == []
    assert watched.session.failure is None


def test_what_was_held_back_is_tried_again_after_a_while(watched):
    generate = Generate(request_id=0, prompt="x", params=SamplingParams())
    number = watched.session.submit(generate, lambda _: None, may_repeat=True)
    full = ErrorInfo(code=ErrorCode.OVERLOADED, message="Full.")
    refusal = Output(request_id=number, sample=0, first_index=0, text="", token_ids=b"", error=full)
    watched.session.receive(watched.frontend.frame(refusal))
    watched.sent()
    assert watched.pulse.beat(101.0) == RETRY_INTERVAL_S
    assert watched.pulse.beat(101.1) == pytest.approx(RETRY_INTERVAL_S - 0.1)
    assert watched.sent() == []
    watched.pulse.beat(101.0 + RETRY_INTERVAL_S)
    assert watched.sent() == [Generate]
    assert watched.pulse.beat(101.5) > 1

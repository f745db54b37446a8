"""The client's core: frames in, events out, one rule at a time."""

import random

import pytest

from frontend.client.errors import EngineGoneError
from frontend.client.results import Delta, Ended, Queued
from frontend.client.session import Failed, Session
from protocol.columns import pack_int32, pack_int64
from protocol.errors import ErrorCode, ProtocolError, RequestError
from protocol.messages import (
    Abort,
    AbortAck,
    AbortState,
    CacheReset,
    Drain,
    ErrorInfo,
    FinishReason,
    Generate,
    Hello,
    Output,
    Ping,
    QueuePositions,
    Reset,
    ResetCache,
    Role,
    SamplingParams,
    Status,
    StatusReply,
)

OVERLOADED = ErrorInfo(code=ErrorCode.OVERLOADED, message="Full.", retry_after_s=5)
STATUS = StatusReply(model="m", ready=True, facts=None, live_requests=0, waiting_requests=0)
BAD = ErrorInfo(code=ErrorCode.INVALID_REQUEST, message="No.", param="prompt")


def request(n=1, text="x"):
    return Generate(request_id=0, prompt=text, params=SamplingParams(n=n))


def output(request_id, tokens, *, sample=0, first=0, reason=FinishReason.STOP, error=None):
    return Output(
        request_id=request_id,
        sample=sample,
        first_index=first,
        text="",
        token_ids=pack_int32(tokens),
        finish_reason=None if error else reason,
        error=error,
    )


def ack(request_id):
    return AbortAck(request_id=request_id, sample=-1, state=AbortState.LIVE, blocks_returned=1)


class Talk:
    """A session and its frontend."""

    def __init__(self, frontend, window=2, *, greeted=True):
        self.frontend = frontend
        self.session = Session("ipc://x", frontend.hear, window=window)
        self.hellos = []
        self.session.greet(b"me", self.hellos.append)
        if greeted:
            self.session.receive(frontend.hello())
            self.sent()

    def submit(self, n=1, **settings):
        """Submit a request; return its number and the list that its events go to."""
        events = []
        return self.session.submit(request(n), events.append, **settings), events

    def say(self, *messages):
        for message in messages:
            self.session.receive(self.frontend.frame(message))

    def forget(self):
        """Say what a frontend says to whom it does not know."""
        self.session.receive(self.frontend.hello())
        self.say(Reset())

    def sent(self):
        return self.frontend.take()

    def sent_ids(self):
        """Return the numbers of the requests sent since the last look."""
        return [message.request_id for message in self.sent() if isinstance(message, Generate)]


@pytest.fixture
def talk(frontend_side):
    return Talk(frontend_side())


def tokens_of(events):
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def ends_of(events):
    return [event for event in events if isinstance(event, Ended)]


# ------------------------------------------------------------------------------
# Hello


def test_nothing_is_sent_before_the_frontend_has_said_hello(frontend_side):
    talk = Talk(frontend_side(), greeted=False)
    talk.submit()
    (hello,) = talk.sent()
    assert (hello.role, hello.identity, hello.epoch) == (Role.CLIENT, b"me", 0)
    talk.session.receive(talk.frontend.hello())
    (generate,) = talk.sent()
    assert (generate.epoch, generate.seq, generate.request_id) == (3, 1, 1)
    assert [type(hello) for hello in talk.hellos] == [Hello]


def test_only_a_frontend_may_answer(frontend_side):
    talk = Talk(frontend_side(), greeted=False)
    with pytest.raises(ProtocolError, match="A scheduler answers at ipc://x"):
        talk.session.receive(talk.frontend.hello(Role.SCHEDULER))


@pytest.mark.parametrize("how", ["has restarted", "does not serve this client"])
def test_another_frontend_or_one_that_will_not_have_us_fails_everything(talk, how):
    _, events = talk.submit()
    if how == "has restarted":
        talk.session.receive(talk.frontend.hello(identity=b"other"))
    else:
        talk.say(Reset())
    assert isinstance(talk.session.failure, EngineGoneError)
    assert how in str(talk.session.failure)
    assert events == [Ended(request_id=1, error=talk.session.failure)]


def test_a_frontend_that_has_forgotten_us_gets_anew_what_it_has_not_answered(frontend_side):
    talk = Talk(frontend_side(), window=4)
    (first, done), (second, begun), (third, waits) = map(talk.submit, (1, 1, 2))
    assert talk.sent_ids() == [first, second, third] == [1, 2, 3]
    (fourth, aborted), (fifth, queued) = talk.submit(), talk.submit()
    acks, statuses = [], []
    talk.say(output(first, [5]))
    assert talk.sent_ids() == [fourth]
    talk.say(output(second, [6], reason=None))
    talk.session.abort(fourth, acks.append)
    talk.session.ask_status(statuses.append)
    talk.sent()

    talk.forget()
    (hello,) = talk.sent()
    assert (hello.role, hello.identity) == (Role.CLIENT, b"me")
    talk.session.ask_status(statuses.append)
    assert talk.sent() == []
    talk.session.receive(talk.frontend.hello())
    sent = talk.sent()
    assert [type(message) for message in sent] == [Status, Status, Generate, Generate]
    assert [message.seq for message in sent] == [1, 2, 3, 4]
    assert [message.request_id for message in sent[2:]] == [third, fifth]
    assert ends_of(done) == [Ended(request_id=first, error=None)]
    (end,) = ends_of(begun)
    assert (end.error.code, "what had begun cannot go on" in end.error.message) == (
        ErrorCode.OVERLOADED,
        True,
    )
    assert [(ack.request_id, ack.state) for ack in acks] == [(fourth, AbortState.UNKNOWN)]
    talk.say(output(third, [7]), output(third, [8], sample=1), output(fifth, [9]))
    assert (tokens_of(waits), tokens_of(aborted), tokens_of(queued)) == ([7, 8], [], [9])
    assert [ends_of(events)[0].error for events in (waits, aborted, queued)] == [None] * 3
    assert talk.session.live_request_ids == []


def test_a_frontend_may_forget_us_twice_if_it_serves_us_between(talk):
    number, events = talk.submit()
    talk.say(STATUS)
    for _ in range(2):
        talk.forget()
        talk.session.receive(talk.frontend.hello())
        talk.say(STATUS)
    assert talk.sent_ids() == [number] * 3
    talk.forget()
    talk.session.receive(talk.frontend.hello())
    talk.forget()
    assert ends_of(events) == [Ended(request_id=number, error=talk.session.failure)]


def test_whoever_leaves_says_so_once(talk, frontend_side):
    talk.session.leave()
    assert [type(message) for message in talk.sent()] == [Reset]
    talk.session.fail(EngineGoneError("ipc://x", "has ended"))
    talk.session.leave()
    assert talk.sent() == []
    early = Talk(frontend_side(), greeted=False)
    early.session.leave()
    assert [type(message) for message in early.sent()] == [Hello]


# ------------------------------------------------------------------------------
# Output


def test_deltas_then_one_end(talk):
    number, events = talk.submit()
    talk.say(output(number, [5, 6], reason=None), output(number, [7], first=2))
    assert tokens_of(events) == [5, 6, 7]
    assert events[-1] == Ended(request_id=number)
    assert talk.session.live_request_ids == []


def test_a_request_ends_with_its_last_sample(talk):
    number, events = talk.submit(n=2)
    talk.say(output(number, [5], sample=1))
    assert ends_of(events) == []
    talk.say(output(number, [6], sample=0, reason=FinishReason.LENGTH))
    assert ends_of(events) == [Ended(request_id=number)]


def test_each_call_sees_its_own_results_alone(talk):
    first, first_events = talk.submit()
    second, second_events = talk.submit()
    talk.say(output(second, [2]), output(first, [1]))
    third, third_events = talk.submit()
    talk.say(output(third, [3]))
    assert [tokens_of(e) for e in (first_events, second_events, third_events)] == [[1], [2], [3]]
    assert len({first, second, third}) == 3


@pytest.mark.parametrize(
    ("first", "then"),
    [([5], output(1, [7], first=2)), ([5], output(1, [5], first=0)), ([], output(1, [6], first=1))],
)
def test_lost_or_repeated_tokens_are_a_broken_protocol(talk, first, then):
    talk.submit()
    talk.say(output(1, first, reason=None))
    with pytest.raises(ProtocolError, match="left out tokens, or sent more after the end"):
        talk.say(then)


def test_control_messages_change_nothing(talk):
    _, events = talk.submit()
    talk.say(Ping(), Drain(deadline=1.0))
    assert events == []
    assert talk.session.failure is None


# ------------------------------------------------------------------------------
# The window


def test_at_most_a_window_is_at_the_engine_and_the_rest_follows_in_order(talk):
    numbers = [talk.submit()[0] for _ in range(5)]
    assert talk.sent_ids() == numbers[:2]
    talk.say(output(numbers[1], [1]))
    assert talk.sent_ids() == [numbers[2]]
    talk.say(output(numbers[0], [1]), output(numbers[2], [1]))
    assert talk.sent_ids() == numbers[3:]


def test_a_window_counts_samples_and_lets_a_larger_request_go_alone(talk):
    small, _ = talk.submit()
    large, _ = talk.submit(n=5)
    after, _ = talk.submit()
    assert talk.sent_ids() == [small]
    talk.say(output(small, [1]))
    assert talk.sent_ids() == [large]
    talk.say(*(output(large, [1], sample=sample) for sample in range(5)))
    assert talk.sent_ids() == [after]


# ------------------------------------------------------------------------------
# Errors


def test_a_refusal_is_an_error_with_its_code_and_parameter(talk):
    number, events = talk.submit()
    talk.say(output(number, [], error=BAD))
    (end,) = events
    assert isinstance(end.error, RequestError)
    assert (end.error.code, end.error.message, end.error.param) == (BAD.code, "No.", "prompt")
    assert [m for m in talk.sent() if isinstance(m, Abort)] == []


def test_one_samples_error_ends_the_request_and_aborts_the_others(talk):
    number, events = talk.submit(n=2)
    waiting, _ = talk.submit()
    talk.sent()
    talk.say(output(number, [5], reason=None), output(number, [], sample=1, error=BAD))
    assert tokens_of(events) == [5]
    assert len(ends_of(events)) == 1
    (abort,) = talk.sent()
    assert (type(abort), abort.request_id, abort.sample) == (Abort, number, -1)
    talk.say(output(number, [6], first=1))  # sent before the abort came
    assert len(events) == 2
    talk.say(ack(number))
    assert talk.sent_ids() == [waiting]


def test_a_refused_request_of_several_samples_ends_once(talk):
    number, events = talk.submit(n=3)
    talk.say(*(output(number, [], sample=sample, error=BAD) for sample in range(3)))
    talk.say(ack(number))
    assert len(events) == 1
    assert talk.session.live_request_ids == []


# ------------------------------------------------------------------------------
# No room


def test_a_request_without_room_waits_until_another_is_over(talk):
    first, _ = talk.submit(may_repeat=True)
    second, second_events = talk.submit(may_repeat=True)
    third, _ = talk.submit(may_repeat=True)
    talk.sent()
    talk.say(output(second, [], error=OVERLOADED))
    assert talk.session.is_held_back
    assert talk.sent() == []
    talk.say(output(first, [1]))
    assert talk.sent_ids() == [second, third]
    talk.say(output(second, [9]))
    assert tokens_of(second_events) == [9]
    assert len(ends_of(second_events)) == 1


def test_a_request_without_room_is_sent_again_when_told(talk):
    number, events = talk.submit(may_repeat=True)
    talk.say(output(number, [], error=OVERLOADED))
    talk.sent()
    talk.session.try_again()
    assert talk.sent_ids() == [number]
    assert events == []


def test_samples_without_room_are_all_taken_back_first(talk):
    number, events = talk.submit(n=2, may_repeat=True)
    talk.say(output(number, [], sample=1, error=OVERLOADED))
    talk.say(output(number, [4], sample=0, reason=None))  # it had got in
    assert [type(message) for message in talk.sent()] == [Generate, Abort]
    talk.session.try_again()
    assert talk.sent() == []
    talk.say(ack(number))
    talk.session.try_again()
    assert talk.sent_ids() == [number]
    talk.say(output(number, [4], sample=0), output(number, [5], sample=1))
    assert tokens_of(events) == [4, 5]


def test_what_may_not_be_repeated_or_has_begun_is_refused(talk):
    once, once_events = talk.submit()
    begun, begun_events = talk.submit(n=2, may_repeat=True)
    talk.say(output(once, [], error=OVERLOADED))
    talk.say(
        output(begun, [1], reason=None),
        output(begun, [], sample=1, error=OVERLOADED),
    )
    assert [end.error.code for end in ends_of(once_events + begun_events)] == [103, 103]
    assert not talk.session.is_held_back


# ------------------------------------------------------------------------------
# Aborts


def test_an_abort_ends_a_request_at_once_and_frees_its_place_when_acknowledged(talk):
    number, events = talk.submit(n=2)
    waiting, _ = talk.submit()
    acks = []
    talk.say(output(number, [5, 6], reason=None))
    talk.sent()
    assert talk.session.abort(number, acks.append)
    first, second = [event for event in events[1:] if isinstance(event, Delta)]
    assert (first.sample, first.first_index, first.finish_reason) == (0, 2, FinishReason.ABORT)
    assert (second.sample, second.first_index, second.finish_reason) == (1, 0, FinishReason.ABORT)
    assert ends_of(events) == [Ended(request_id=number)]
    assert [type(message) for message in talk.sent()] == [Abort]
    talk.say(output(number, [7], first=2), ack(number))
    assert len(events) == 4
    assert [one.request_id for one in acks] == [number]
    assert talk.sent_ids() == [waiting]


def test_what_waits_here_is_aborted_without_the_engine(talk):
    numbers = [talk.submit()[0] for _ in range(4)]
    talk.sent()
    assert not talk.session.abort(numbers[2])
    talk.say(output(numbers[0], [1]))
    assert talk.sent_ids() == [numbers[3]]


def test_aborting_twice_tells_the_engine_once_and_acknowledges_both(talk):
    number, events = talk.submit()
    acks = []
    talk.sent()
    assert talk.session.abort(number, acks.append)
    assert talk.session.abort(number, acks.append)
    assert len(talk.sent()) == 1
    talk.say(ack(number))
    assert len(acks) == 2
    assert len(ends_of(events)) == 1
    assert not talk.session.abort(number)


def test_a_request_waiting_for_room_can_be_aborted(talk):
    number, events = talk.submit(may_repeat=True)
    talk.say(output(number, [], error=OVERLOADED))
    talk.sent()
    assert not talk.session.abort(number)
    talk.session.try_again()
    assert talk.sent() == []
    assert len(ends_of(events)) == 1


def test_a_request_being_taken_back_can_be_aborted(talk):
    number, events = talk.submit(n=2, may_repeat=True)
    talk.say(output(number, [], error=OVERLOADED))
    assert talk.session.abort(number)
    talk.say(ack(number))
    talk.sent()
    talk.session.try_again()
    assert talk.sent() == []
    assert [event.sample for event in events[:-1]] == [1]
    assert len(ends_of(events)) == 1


# ------------------------------------------------------------------------------
# Status, failure


def test_each_status_is_answered_in_its_order(talk):
    replies = []
    talk.session.ask_status(lambda reply: replies.append(("first", reply.live_requests)))
    talk.session.ask_status(lambda reply: replies.append(("second", reply.live_requests)))
    assert [type(message) for message in talk.sent()] == [Status, Status]
    for live in (1, 2):
        talk.say(
            StatusReply(model="m", ready=True, facts=None, live_requests=live, waiting_requests=0)
        )
    assert replies == [("first", 1), ("second", 2)]


def test_each_reset_of_the_cache_is_answered_in_its_order_also_by_who_has_forgotten_us(talk):
    answers = []
    talk.session.ask_cache_reset(lambda answer: answers.append(("first", answer)))
    talk.session.ask_cache_reset(lambda answer: answers.append(("second", answer)))
    assert [type(message) for message in talk.sent()] == [ResetCache, ResetCache]
    talk.say(CacheReset(blocks_forgotten=4))
    talk.forget()
    talk.session.receive(talk.frontend.hello())
    assert [type(message) for message in talk.sent()] == [Hello, ResetCache]
    talk.say(CacheReset(blocks_forgotten=0), CacheReset(blocks_forgotten=9))
    assert [(who, answer.blocks_forgotten) for who, answer in answers] == [
        ("first", 4),
        ("second", 0),
    ]


def test_a_failure_tells_everybody_who_waits_once(talk):
    _, sent_events = talk.submit()
    _, aborted_events = talk.submit()
    _, queued_events = talk.submit()
    answers = []
    talk.session.abort(2, answers.append)
    talk.session.ask_status(answers.append)
    talk.session.ask_cache_reset(answers.append)
    gone = EngineGoneError("ipc://x", "has ended")
    talk.session.fail(gone)
    talk.session.fail(EngineGoneError("ipc://x", "has ended again"))
    assert sent_events == [Ended(request_id=1, error=gone)]
    assert queued_events == [Ended(request_id=3, error=gone)]
    assert ends_of(aborted_events) == [Ended(request_id=2)]
    assert answers == [Failed(gone)] * 3
    for ask in (talk.submit, lambda: talk.session.ask_status(answers.append)):
        with pytest.raises(EngineGoneError, match="The engine at ipc://x has ended\\."):
            ask()
    talk.say(output(1, [1]))
    assert len(sent_events) == 1


# ------------------------------------------------------------------------------
# All of it, at random


class Engine:
    """Answers a session's requests in any order, sometimes with an error or nothing for a while."""

    def __init__(self, talk, rng):
        self.talk, self.rng = talk, rng
        self.samples = {}
        self.acks = []

    def listen(self):
        for message in self.talk.sent():
            if isinstance(message, Generate):
                assert message.request_id not in {number for number, _ in self.samples}
                for sample in range(message.params.n):
                    self.samples[message.request_id, sample] = 0
            elif isinstance(message, Abort):
                self.acks.append(message.request_id)

    def speak(self):
        if self.acks and self.rng.random() < 0.5:
            number = self.acks.pop(0)
            self.samples = {key: at for key, at in self.samples.items() if key[0] != number}
            self.talk.say(ack(number))
        elif self.samples:
            number, sample = self.rng.choice(sorted(self.samples))
            at = self.samples[number, sample]
            draw = self.rng.random()
            error = OVERLOADED if draw < 0.1 and at == 0 else BAD if draw < 0.15 else None
            reason = FinishReason.STOP if self.rng.random() < 0.4 else None
            text = output(number, [at], sample=sample, first=at, reason=reason, error=error)
            if error or reason:
                del self.samples[number, sample]
            else:
                self.samples[number, sample] += 1
            self.talk.say(text)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_each_request_ends_once_and_the_window_holds(frontend_side, seed):
    rng = random.Random(seed)
    window = rng.randint(1, 6)
    talk = Talk(frontend_side(), window=window)
    engine = Engine(talk, rng)
    events = {}
    for _ in range(400):
        draw = rng.random()
        if draw < 0.25 and len(events) < 40:
            number, sink = talk.submit(n=rng.choice([1, 1, 1, 3]), may_repeat=rng.random() < 0.5)
            events[number] = sink
        elif draw < 0.3 and events:
            talk.session.abort(rng.choice(list(events)))
        elif draw < 0.35:
            talk.session.try_again()
        else:
            engine.speak()
        engine.listen()
        at_engine = {number for number, _ in engine.samples}
        assert len(engine.samples) <= max(window, 3)
        assert len(at_engine) <= window
    for _ in range(5000):
        if not (talk.session.live_request_ids or engine.samples or engine.acks):
            break
        talk.session.try_again()
        engine.listen()
        engine.speak()
    assert talk.session.live_request_ids == []
    for number, sink in events.items():
        assert sink[-1].request_id == number
        assert len(ends_of(sink)) == 1
        for sample in range(3):
            shown = [e for e in sink if isinstance(e, Delta) and e.sample == sample]
            assert tokens_of(shown) == list(range(len(tokens_of(shown))))


def test_a_refusal_tells_when_to_try_again(talk):
    _, events = talk.submit()
    talk.say(output(1, [], error=OVERLOADED))
    (end,) = ends_of(events)
    assert (end.error.code, end.error.retry_after_s) == (ErrorCode.OVERLOADED, 5)


def positions(*rows):
    return QueuePositions(
        requests=pack_int64(number for number, _ in rows),
        positions=pack_int32(position for _, position in rows),
    )


def test_a_request_hears_where_it_waits_until_it_has_output(talk):
    _, events = talk.submit()
    _, others = talk.submit()
    talk.say(positions((1, 3), (2, 4), (99, 1)), positions((1, 1)))
    assert events == [Queued(request_id=1, position=3), Queued(request_id=1, position=1)]
    talk.say(output(1, [5], reason=None), positions((1, 2)))
    assert [type(event) for event in events] == [Queued, Queued, Delta]
    talk.session.abort(2)
    talk.say(positions((2, 1)))
    assert [type(event) for event in others] == [Queued, Delta, Ended]

"""Requests against a scheduler and a text process that do what a test says."""

import asyncio
import time

import msgspec
import pytest

from frontend.deltas import DeltaQueue, TokenLogprobs
from frontend.engine_client import EngineClient
from frontend.generation import DeadlineError, GenerationRequest
from frontend.seeds import SeedSource
from frontend.text.text_model import TextModel
from frontend.vocabulary import WordlessVocabulary
from protocol.columns import pack_int32, pack_int64, unpack_int32
from protocol.errors import ErrorCode, ProcessError, RequestError
from protocol.messages import (
    Abort,
    AbortAck,
    AbortState,
    AddSequence,
    CacheStats,
    ChatMessage,
    FinishReason,
    Ping,
    QueuePositions,
    SamplingParams,
)
from tests.frontend.conftest import FACTS, DeskText, make_deltas

PROMPT = pack_int32([1, 2, 3])


class Bench:
    """An engine client with its hands free."""

    def __init__(self, text, model, vocabulary):
        self.sent = []
        self.is_stuck = False
        self.queue = DeltaQueue()
        self.engine = EngineClient(self._send, text, SeedSource(0, 0), max_live_sequences=8)
        self.engine.meet_scheduler(FACTS)
        self.engine.learn_text(model, vocabulary)

    def _send(self, message):
        if self.is_stuck:
            raise ProcessError("full")
        self.sent.append(message)

    async def start(self, prompt=PROMPT, **params):
        request = GenerationRequest(prompt=prompt, params=SamplingParams(**params))
        return self.engine.start(await self.engine.prepare(request), self.queue)

    def sequences(self):
        return [message for message in self.sent if isinstance(message, AddSequence)]

    def aborts(self):
        return [(m.request_id, m.sample) for m in self.sent if isinstance(m, Abort)]

    def tokens(self, sequence, ids, *, first, reason=0, **fields):
        self.engine.take_deltas(make_deltas(sequence, ids, first=first, reason=reason, **fields))

    async def take(self):
        async with asyncio.timeout(1):
            return await self.queue.take()


@pytest.fixture
def bench(smol, smol_desk, smol_vocabulary):
    """Return a function that runs a coroutine function with a Bench."""

    def run(use):
        async def main():
            return await use(Bench(DeskText(smol_desk), smol, smol_vocabulary))

        return asyncio.run(main())

    return run


def test_a_request_from_start_to_end(bench):
    async def use(bench):
        request = await bench.start(max_tokens=5)
        (sequence,) = bench.sequences()
        bench.tokens(sequence, [28120], first=0, cached=2)
        first = await bench.take()
        bench.tokens(sequence, [665, 2], first=1, reason=FinishReason.STOP)
        (last,) = await bench.take()
        return request, sequence, first, last, bench.engine.num_live_requests, bench.aborts()

    request, sequence, (first,), last, live, aborts = bench(use)
    assert (sequence.request_id, sequence.sample) == (1, 0)
    assert unpack_int32(sequence.prompt_ids) == [1, 2, 3]
    assert (first.text, first.token_ids, first.is_last) == ("hello", [28120], False)
    assert (last.token_ids, last.finish_reason) == ([665, 2], FinishReason.STOP)
    assert (live, aborts) == (0, [])
    usage = request.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 3, 2)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("hello", "hello"),
        (
            [ChatMessage(role="system", content="S"), ChatMessage(role="user", content="hello")],
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (pack_int32([28120, 2]), "hello<|im_end|>"),
    ],
    ids=["text", "chat", "ids"],
)
def test_prompts_of_all_kinds(bench, smol_tokenizer, prompt, text):
    async def use(bench):
        await bench.start(prompt)
        return unpack_int32(bench.sequences()[0].prompt_ids)

    assert smol_tokenizer.decode(bench(use), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("prompt", "params", "code", "param"),
    [
        ("", {}, ErrorCode.INVALID_REQUEST, "prompt"),
        (b"", {}, ErrorCode.INVALID_REQUEST, "prompt"),
        ([], {}, ErrorCode.INVALID_REQUEST, "messages"),
        ("x", {"n": 0}, ErrorCode.INVALID_REQUEST, "n"),
        ("x", {"top_p": 0.0}, ErrorCode.INVALID_REQUEST, "top_p"),
        ("a" * 10**6, {}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt"),
        ("a " * 600, {}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt"),
        ("x", {"n": 9}, ErrorCode.OVERLOADED, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_refusal_leaves_nothing_behind(bench, prompt, params, code, param):
    async def use(bench):
        with pytest.raises(RequestError) as caught:
            await bench.start(prompt, **params)
        return caught.value, bench.sent, bench.engine.num_live_requests

    error, sent, live = bench(use)
    assert (error.code, error.param) == (code, param)
    assert (sent, live) == ([], 0)


def test_priority_and_deadline_are_every_samples(bench):
    async def use(bench):
        deadline = time.monotonic() + 50
        request = GenerationRequest(
            prompt="hello", params=SamplingParams(n=2), priority=3, deadline=deadline
        )
        bench.engine.start(await bench.engine.prepare(request), bench.queue)
        again = [sample.resumed() for sample in bench.engine._requests[1].samples]
        return deadline, bench.sequences(), again

    deadline, *sequences = bench(use)
    for each in sequences:
        assert [(sequence.priority, sequence.deadline) for sequence in each] == [(3, deadline)] * 2


@pytest.mark.parametrize("left_s", [-1.0, 0.02])
def test_time_that_runs_out_while_the_text_process_has_the_prompt(bench, left_s):
    async def use(bench):
        async def tokenize(text, *, add_special_tokens):
            await asyncio.sleep(30)

        bench.engine._text.tokenize = tokenize
        request = GenerationRequest(
            prompt="hello", params=SamplingParams(), deadline=time.monotonic() + left_s
        )
        with pytest.raises(DeadlineError):
            await bench.engine.prepare(request)
        return bench.sent, bench.engine.num_live_requests

    assert bench(use) == ([], 0)


def test_samples_are_sequences_and_end_on_their_own(bench):
    async def use(bench):
        request = await bench.start(n=3, seed=5)
        sequences = bench.sequences()
        bench.tokens(sequences[1], [28120], first=0, reason=FinishReason.LENGTH)
        (delta,) = await bench.take()
        after_one = request.is_finished
        for sample in (0, 2):
            bench.tokens(sequences[sample], [665], first=0, reason=FinishReason.LENGTH)
        deltas = await bench.take()
        return sequences, delta, after_one, deltas, request, bench.engine.num_live_requests

    sequences, delta, after_one, deltas, request, live = bench(use)
    assert [sequence.sample for sequence in sequences] == [0, 1, 2]
    assert len({sequence.params.seed for sequence in sequences}) == 3
    assert sequences[0].params.seed == 5
    assert (delta.sample, after_one) == (1, False)
    assert [d.sample for d in deltas] == [0, 2]
    assert request.is_finished
    assert request.usage().completion_tokens == 3
    assert live == 0


def test_a_stop_string_reports_stop_aborts_and_drops_what_comes_later(bench):
    async def use(bench):
        await bench.start(stop=["hello"], n=2)
        first, second = bench.sequences()
        bench.tokens(first, [28120], first=0)
        (delta,) = await bench.take()
        bench.tokens(first, [665], first=1)
        bench.tokens(first, [], first=2, reason=FinishReason.LENGTH)
        bench.tokens(second, [665], first=0, reason=FinishReason.LENGTH)
        (other,) = await bench.take()
        waiting = bench.engine.num_unacknowledged_aborts
        bench.engine.take_ack(
            AbortAck(request_id=1, sample=0, state=AbortState.LIVE, blocks_returned=1)
        )
        return delta, other, bench.aborts(), waiting, bench.engine

    delta, other, aborts, waiting, engine = bench(use)
    assert (delta.text, delta.finish_reason) == ("", FinishReason.STOP)
    assert other.sample == 1
    assert (aborts, waiting) == ([(1, 0)], 1)
    assert (engine.num_unacknowledged_aborts, engine.num_live_requests) == (0, 0)


def test_what_a_resumed_sequence_finds_again_is_not_counted_as_cached(bench):
    async def use(bench):
        request = await bench.start(n=2)
        first, second = bench.sequences()
        bench.tokens(first, [5, 6], first=0, cached=1)
        bench.engine.meet_scheduler(FACTS)  # it has forgotten both
        bench.tokens(first, [7], first=2, cached=3, reason=FinishReason.LENGTH)
        bench.tokens(second, [7], first=0, cached=2, reason=FinishReason.LENGTH)
        return [request.sample_usage(sample).cached_tokens for sample in range(2)]

    assert bench(use) == [1, 2]


def test_an_abort_by_the_client_drops_everything(bench):
    async def use(bench):
        request = await bench.start(n=2)
        (first, _) = bench.sequences()
        bench.tokens(first, [28120], first=0)
        acknowledged = bench.engine.abort(request)
        again = bench.engine.abort(request)
        bench.tokens(first, [665], first=1)
        bench.queue.nudge()
        left = await bench.take()
        ack = AbortAck(request_id=1, sample=-1, state=AbortState.LIVE, blocks_returned=4)
        bench.engine.take_ack(ack)
        return left, bench.aborts(), await acknowledged, again, bench.engine.num_live_requests

    left, aborts, ack, again, live = bench(use)
    assert (left, aborts, again, live) == ([], [(1, -1)], None, 0)
    assert ack.blocks_returned == 4


def test_one_sample_can_be_aborted_alone(bench):
    async def use(bench):
        request = await bench.start(n=2)
        first, second = bench.sequences()
        bench.engine.abort(request, 0)
        bench.tokens(first, [28120], first=0)
        bench.tokens(second, [665], first=0, reason=FinishReason.LENGTH)
        return await bench.take(), bench.aborts(), bench.engine.num_live_requests

    deltas, aborts, live = bench(use)
    assert [delta.sample for delta in deltas] == [1]
    assert (aborts, live) == ([(1, 0)], 0)


def test_repeated_tokens_are_dropped_and_a_gap_is_our_bug(bench, caplog):
    async def use(bench):
        await bench.start()
        (sequence,) = bench.sequences()
        bench.tokens(sequence, [28120], first=0)
        bench.tokens(sequence, [28120, 665], first=0)
        (delta,) = await bench.take()
        bench.tokens(sequence, [5], first=3)
        (last,) = await bench.take()
        return delta, last, bench.aborts(), bench.engine.num_live_requests

    delta, last, aborts, live = bench(use)
    assert delta.token_ids == [28120, 665]
    assert last.error.code is ErrorCode.INTERNAL
    assert (aborts, live) == ([(1, 0)], 0)
    assert "our bug, please report" in caplog.text


def test_rows_of_unknown_requests_and_samples_are_ignored(bench):
    async def use(bench):
        await bench.start()
        (sequence,) = bench.sequences()
        for other in ({"request_id": 99}, {"sample": 3}):
            bench.tokens(msgspec.structs.replace(sequence, **other), [5], first=0)
        bench.queue.nudge()
        return await bench.take()

    assert bench(use) == []


def test_logprobs_go_to_their_tokens(bench):
    async def use(bench):
        await bench.start(logprobs=1)
        (sequence,) = bench.sequences()
        bench.tokens(sequence, [5, 6], first=0, logprobs=[([5, 6], [-0.5, -1.0]), ([6], [-0.25])])
        return await bench.take()

    (delta,) = bench(use)
    assert delta.logprobs == [
        TokenLogprobs([5, 6], [-0.5, -1.0], 0),
        TokenLogprobs([6], [-0.25], 1),
    ]


def test_a_scheduler_that_lacks_everything_is_given_it_again(bench):
    async def use(bench):
        request = await bench.start(n=2)
        first, second = bench.sequences()
        bench.tokens(first, [28120, 665], first=0)
        bench.tokens(second, [5], first=0, reason=FinishReason.LENGTH)
        acknowledged = bench.engine.abort(await bench.start())
        await bench.take()
        bench.sent.clear()
        bench.engine.meet_scheduler(FACTS)
        (again,) = bench.sequences()
        # It may repeat what we have seen; only what is new is passed on.
        bench.tokens(again, [665, 7], first=1)
        (delta,) = await bench.take()
        return again, delta, (await acknowledged).state, request.usage(), bench.aborts()

    again, delta, state, usage, aborts = bench(use)
    assert (again.request_id, again.sample, again.next_index) == (1, 0, 2)
    assert unpack_int32(again.resume_ids) == [28120, 665]
    assert delta.token_ids == [7]
    assert (state, aborts) == (AbortState.UNKNOWN, [])
    assert usage.completion_tokens == 4


def test_a_scheduler_that_takes_nothing_fails_the_request_only(bench):
    async def use(bench):
        bench.is_stuck = True
        await bench.start(n=2)
        deltas = await bench.take()
        bench.is_stuck = False
        await bench.start()
        return deltas, bench.engine.num_live_requests

    deltas, live = bench(use)
    assert [delta.error.code for delta in deltas] == [ErrorCode.NOT_READY] * 2
    assert live == 1


def test_why_it_is_not_ready(smol, smol_desk, smol_vocabulary):
    async def main():
        sent = []
        engine = EngineClient(
            sent.append, DeskText(smol_desk), SeedSource(0, 0), max_live_sequences=1
        )
        reasons = [engine.why_not_ready()]
        engine.meet_scheduler(FACTS)
        reasons.append(engine.why_not_ready())
        engine.learn_text(smol, smol_vocabulary)
        reasons.append(engine.why_not_ready())
        engine.start_draining(1.0)
        engine.start_draining(2.0)
        reasons.append(engine.why_not_ready())
        with pytest.raises(RequestError) as caught:
            await engine.prepare(GenerationRequest(prompt=PROMPT, params=SamplingParams()))
        return reasons, caught.value, engine.drain_deadline

    (first, second, third, fourth), error, deadline = asyncio.run(main())
    assert "scheduler" in first
    assert "tokenizer" in second
    assert third is None
    assert "stopping" in fourth
    assert (error.code, error.message) == (ErrorCode.NOT_READY, fourth)
    assert deadline == 1.0


def test_the_end_of_all(bench):
    async def use(bench):
        await bench.start(n=2, stop=["hello!"])
        first, second = bench.sequences()
        bench.tokens(first, [28120], first=0)
        bench.tokens(second, [5], first=0, reason=FinishReason.LENGTH)
        await bench.take()
        bench.engine.end_all()
        (delta,) = await bench.take()
        return delta, bench.aborts(), bench.engine.num_live_requests

    delta, aborts, live = bench(use)
    assert (delta.text, delta.error.code) == ("hello", ErrorCode.NOT_READY)
    assert (aborts, live) == ([(1, -1)], 0)


def test_progress_and_pings(bench, monkeypatch):
    async def use(bench):
        bench.engine.take_ping(Ping(waiting_requests=5, cache=CacheStats(free_blocks=7)))
        answers = [bench.engine.is_progressing()]
        monkeypatch.setattr("frontend.engine_client.SILENCE_LIMIT_S", 0.0)
        answers.append(bench.engine.is_progressing())
        bench.engine.facts = None
        answers.append(bench.engine.is_progressing())
        return answers, bench.engine.waiting_requests, bench.engine.cache

    assert bench(use) == ([True, False, True], 5, CacheStats(free_blocks=7))


FULL = Ping(
    waiting_requests=4, waiting_tokens=40, max_waiting_requests=4, max_waiting_tokens=99,
    retry_after_s=12,
)  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "ping"),
    [
        ("hello", FULL),
        ([ChatMessage(role="user", content="hello")], FULL),
        (PROMPT, FULL),
        ("hello", msgspec.structs.replace(FULL, max_waiting_requests=9, waiting_tokens=99)),
        (PROMPT, msgspec.structs.replace(FULL, max_waiting_requests=9, waiting_tokens=97)),
    ],
    ids=["text", "chat", "ids", "text by tokens", "ids by tokens"],
)
def test_a_queue_that_is_known_to_be_full_refuses_before_tokenizing(bench, prompt, ping):
    async def use(bench):
        jobs = []
        bench.engine._text.tokenize = bench.engine._text.render = jobs.append
        bench.engine.take_ping(ping)
        with pytest.raises(RequestError) as caught:
            await bench.start(prompt)
        return caught.value, jobs, bench.sent

    error, jobs, sent = bench(use)
    assert (error.code, error.retry_after_s) == (ErrorCode.OVERLOADED, 12)
    assert (jobs, sent) == ([], [])


def test_a_text_of_too_many_tokens_is_refused_when_they_are_known(bench):
    async def use(bench):
        bench.engine.take_ping(msgspec.structs.replace(FULL, max_waiting_requests=9))
        with pytest.raises(RequestError, match="40 tokens are waiting already") as caught:
            await bench.start("hello " * 70)
        await bench.start("hello " * 20)
        return caught.value.retry_after_s, len(bench.sent)

    assert bench(use) == (12, 1)


def test_a_refusal_that_comes_from_the_scheduler_says_when_to_try_again_too(bench):
    async def use(bench):
        bench.engine.take_ping(msgspec.structs.replace(FULL, waiting_requests=0))
        await bench.start()
        (sequence,) = bench.sequences()
        bench.tokens(sequence, [], first=0, reason=ErrorCode.OVERLOADED)
        return await bench.take()

    (delta,) = bench(use)
    assert (delta.error.code, delta.error.retry_after_s) == (ErrorCode.OVERLOADED, 12)


def test_positions_go_to_the_requests_they_are_of(bench):
    async def use(bench):
        for _ in range(2):
            await bench.start(n=2)
        told = []
        for requests, positions in (
            ([1, 1, 2, 99], [5, 6, 9, 1]),
            ([1, 2], [5, 8]),
            ([1, 1], [0, 3]),
            ([1], [7]),
        ):
            bench.engine.take_positions(
                QueuePositions(requests=pack_int64(requests), positions=pack_int32(positions))
            )
            told.append(bench.queue.take_positions())
        return told

    assert bench(use) == [{1: 5, 2: 9}, {2: 8}, {1: 0}, {}]


def test_text_and_ids(bench):
    async def use(bench):
        return (
            await bench.engine.tokenize("hello", add_special_tokens=True),
            bench.engine.decode([28120, 2], skip_special_tokens=False),
            bench.engine.decode([28120, 2], skip_special_tokens=True),
        )

    assert bench(use) == ([28120], "hello<|im_end|>", "hello")


def test_a_model_without_a_tokenizer_works_on_ids():
    async def main():
        bench = Bench(None, TextModel(eos_ids=[9]), WordlessVocabulary())
        await bench.start()
        (sequence,) = bench.sequences()
        bench.tokens(sequence, [5, 6], first=0, reason=FinishReason.LENGTH)
        return sequence.params.stop_token_ids, await bench.take()

    stop_token_ids, (delta,) = asyncio.run(main())
    assert stop_token_ids == [9]
    assert (delta.text, delta.token_ids) == ("", [5, 6])


@pytest.mark.parametrize(
    ("eos_ids", "name", "stop_token_ids"),
    [
        ([2], "<|im_end|>", [2]),
        ([0], "<|im_end|>", [0, 2]),
        ([], "<|im_end|>", [2]),
        ([5], "", [5]),
    ],
)
def test_every_end_token_that_the_models_files_name(
    smol, smol_vocabulary, eos_ids, name, stop_token_ids
):
    async def main():
        special = {"eos_token": name} if name else {}
        model = msgspec.structs.replace(smol, eos_ids=eos_ids, special_tokens=special)
        bench = Bench(None, model, smol_vocabulary)
        await bench.start()
        return bench.sequences()[0].params.stop_token_ids

    assert asyncio.run(main()) == stop_token_ids

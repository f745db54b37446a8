"""The engine client: one way to the engine for all surfaces.

    prepare   validate, render, tokenize, settle what is open    may fail, and leaves nothing behind
    start     give the sequences to the scheduler                their deltas come to a queue
    abort     end what has not ended

Every sample ends with exactly one last delta, unless its client aborts it. A stop string is found
here: the sample ends at once, and the scheduler is told to abort it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from frontend.bad_words import resolve_bad_words
from frontend.cache_resets import CacheResets
from frontend.deltas import DeltaQueue, DeltaRow, delta_rows
from frontend.generation import (
    DeadlineError,
    GenerationRequest,
    PreparedRequest,
    check_chat,
    check_priority,
    settle,
)
from frontend.known_queue import KnownQueue
from frontend.live_request import LiveRequest, least_positions
from frontend.sample import Sample, failure, make_samples
from frontend.seeds import SeedSource
from frontend.text.text_model import TextModel
from frontend.text_client import TextClient
from frontend.vocabulary import Vocabulary
from protocol.columns import unpack_int32
from protocol.errors import ErrorCode, ProcessError, ProtocolError, RequestError
from protocol.messages import (
    Abort,
    AbortAck,
    AbortState,
    AddSequence,
    CacheReset,
    CacheStats,
    EngineFacts,
    ErrorInfo,
    Ping,
    QueuePositions,
    ResetCache,
    SamplingDefaults,
    TokenDeltas,
)
from protocol.sampling import NEUTRAL
from protocol.validation import longest_sequence, validate_params

SILENCE_LIMIT_S = 5.0
"""Longest silence of the scheduler, which speaks every second, that counts as progress."""

log = logging.getLogger(__name__)


class EngineClient:
    """Requests in, deltas out."""

    def __init__(
        self,
        send: Callable[[AddSequence | Abort | ResetCache], None],
        text: TextClient,
        seeds: SeedSource,
        *,
        max_live_sequences: int,
    ) -> None:
        """`send` sends to the scheduler and raises ProcessError if it takes nothing."""
        self.facts: EngineFacts | None = None
        """What the engine has, once the scheduler has said Hello."""
        self.text_model: TextModel | None = None
        self.vocabulary: Vocabulary | None = None
        """What token ids spell, once the text process has said Hello."""
        self.defaults = SamplingDefaults()
        """In effect for requests that leave them open."""
        self.waiting_requests = 0
        """At the scheduler, as it last said."""
        self.cache: CacheStats | None = None
        """The scheduler's prefix cache, as it last said."""
        self.drain_deadline: float | None = None
        """Set when nothing new is taken any more; seconds on the monotonic clock."""
        self.news = asyncio.Event()
        """Set whenever readiness or draining may have changed."""
        self._queue = KnownQueue()
        self._send = send
        self._text = text
        self._seeds = seeds
        self._max_live_sequences = max_live_sequences
        self._eos_ids: Sequence[int] = ()
        self._requests: dict[int, LiveRequest] = {}
        self._request_ids = 0
        self._cache_resets = CacheResets(send)
        self._unacknowledged: dict[tuple[int, int], asyncio.Future[AbortAck]] = {}
        self._last_heard = time.monotonic()

    # --------------------------------------------------------------------------
    # How things are

    @property
    def num_live_requests(self) -> int:
        """Requests that the scheduler works on."""
        return len(self._requests)

    @property
    def num_unacknowledged_aborts(self) -> int:
        """Aborts whose effect the scheduler has not confirmed."""
        return len(self._unacknowledged)

    def why_not_ready(self) -> str | None:
        """Return why no request can be taken now, as a sentence; None if one can."""
        if self.drain_deadline is not None:
            return "The server is stopping and takes no new requests."
        if self.facts is None:
            return "The engine is starting: the scheduler has not reported yet."
        if self.vocabulary is None:
            return "The engine is starting: the tokenizer is not loaded yet."
        return None

    def is_progressing(self) -> bool:
        """Return whether the scheduler's loop comes round, which holds its ranks to their time.

        Before it has said Hello nothing is expected of it.
        """
        return self.facts is None or time.monotonic() - self._last_heard < SILENCE_LIMIT_S

    def learn_text(
        self, model: TextModel, vocabulary: Vocabulary, defaults: SamplingDefaults = NEUTRAL
    ) -> None:
        """Take the model's text facts, and the sampling defaults that are in effect."""
        self.defaults = defaults
        self.text_model = model
        self.vocabulary = vocabulary
        named = vocabulary.token_id(model.special_tokens.get("eos_token", ""))
        self._eos_ids = [*model.eos_ids, *([] if named is None else [named])]
        self.news.set()

    # --------------------------------------------------------------------------
    # What surfaces ask for

    async def prepare(self, request: GenerationRequest) -> PreparedRequest:
        """Make a request ready to start.

        Raises RequestError, or DeadlineError if its time runs out; nothing is left behind then.
        """
        facts = self._require_ready()
        live = sum(len(request.samples) for request in self._requests.values())
        if live + request.params.n > self._max_live_sequences:
            raise self._queue.overloaded(
                f"{live} sequences are being worked on, and {self._max_live_sequences} are the "
                "most that may be"
            )
        validate_params(request.params, facts)
        check_priority(request.priority)
        # Of a text it is not known yet how many tokens it has: one, at least.
        given = len(request.prompt) // 4 if isinstance(request.prompt, bytes) else 1
        self._queue.check_room(request.params.n, given)
        left = None if request.deadline is None else request.deadline - time.monotonic()
        try:
            with self._queue.preparing(request.params.n):
                async with asyncio.timeout(left):
                    request = await resolve_bad_words(request, self._text)
                    prompt_ids = await self._encode(request, facts)
        except TimeoutError as error:
            raise DeadlineError("The request's time ran out before its prompt was read.") from error
        seed = self._seeds.draw()
        prepared = settle(
            request, prompt_ids, facts, eos_ids=self._eos_ids, seed=seed, defaults=self.defaults
        )
        self._queue.check_room(request.params.n, len(prepared.prompt_ids) // 4)
        return prepared

    def start(self, prepared: PreparedRequest, queue: DeltaQueue) -> LiveRequest:
        """Give a prepared request to the scheduler; its deltas come to `queue`."""
        self._request_ids += 1
        request = LiveRequest(
            self._request_ids,
            make_samples(self._request_ids, prepared, self._require_vocabulary()),
            queue,
            num_prompt_tokens=len(prepared.prompt_ids) // 4,
        )
        self._requests[request.request_id] = request
        for sample in request.samples:
            self._submit(request, sample, sample.sequence)
        return request

    def abort(self, request: LiveRequest, sample: int = -1) -> asyncio.Future[AbortAck] | None:
        """End one sample that its client no longer wants, or all that have not ended.

        Returns what the scheduler says to it, or None if there was nothing to end.
        """
        ended = [
            live
            for live in request.samples
            if not live.is_finished and sample in (-1, live.sequence.sample)
        ]
        for live in ended:
            live.is_finished = True
            request.queue.discard(request.request_id, live.sequence.sample)
        self._forget_if_finished(request)
        return self._send_abort(request.request_id, sample) if ended else None

    async def reset_cache(self) -> int:
        """Have every cached prefix forgotten; return the blocks. Raises RequestError."""
        self._require_ready()
        return await self._cache_resets.ask()

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. Raises RequestError."""
        facts = self._require_ready()
        self._refuse_longer_than_fits(len(text), facts)
        ids = await self._text.tokenize(text, add_special_tokens=add_special_tokens)
        return unpack_int32(ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids. Raises RequestError."""
        self._require_ready()
        vocabulary = self._require_vocabulary()
        detokenizer = vocabulary.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    # --------------------------------------------------------------------------
    # What the scheduler says

    def meet_scheduler(self, facts: EngineFacts) -> None:
        """Take the engine's facts, and give the scheduler what it lacks."""
        log.info("met the scheduler facts=%s", facts)
        self._last_heard = time.monotonic()
        self.facts = facts
        self.news.set()
        for request_id, index in list(self._unacknowledged):
            self._settle_abort(_no_ack(request_id, index))
        for request in list(self._requests.values()):
            for sample in request.samples:
                if not sample.is_finished:
                    self._submit(request, sample, sample.resumed())
        self._cache_resets.ask_again()

    def take_deltas(self, deltas: TokenDeltas) -> None:
        """Route new tokens to the samples they belong to; unknown ones have been aborted."""
        self._last_heard = time.monotonic()
        for row in delta_rows(deltas):
            request = self._requests.get(row.request_id)
            if request is not None and row.sample < len(request.samples):
                request.samples[row.sample].learn_cached_tokens(row.cached_tokens)
                self._accept(request, request.samples[row.sample], row)

    def take_ack(self, ack: AbortAck) -> None:
        """Note that an abort has taken effect."""
        self._last_heard = time.monotonic()
        self._settle_abort(ack)

    def take_cache_reset(self, answer: CacheReset) -> None:
        """Note that the prefix cache has been reset."""
        self._last_heard = time.monotonic()
        self._cache_resets.take(answer)

    def take_ping(self, ping: Ping) -> None:
        """Note that the scheduler is there, how long its queue is, and how its cache does."""
        self._last_heard = time.monotonic()
        self.waiting_requests = ping.waiting_requests
        self.cache = ping.cache
        self._queue.take(ping)

    def take_positions(self, positions: QueuePositions) -> None:
        """Pass on where requests are in the scheduler's queue."""
        for request_id, position in least_positions(positions).items():
            request = self._requests.get(request_id)
            if request is not None and request.move_to(position):
                request.queue.put_position(request_id, position)

    def start_draining(self, deadline: float) -> None:
        """Take nothing new from now on; a second call can bring the deadline forward."""
        if self.drain_deadline is None or deadline < self.drain_deadline:
            log.info("draining live_requests=%d", len(self._requests))
            self.drain_deadline = deadline
            self.news.set()

    def end_all(self) -> None:
        """End what is still live, with an error that says why."""
        error = ErrorInfo(
            code=ErrorCode.NOT_READY, message="The server stopped before this was finished."
        )
        for request in list(self._requests.values()):
            for sample in request.samples:
                if not sample.is_finished:
                    request.queue.put(sample.end(error))
            self._forget(request)
            self._send_abort(request.request_id, -1)

    # --------------------------------------------------------------------------

    def _require_ready(self) -> EngineFacts:
        reason = self.why_not_ready()
        if reason is not None or self.facts is None:
            raise RequestError(ErrorCode.NOT_READY, reason or "The engine is starting.")
        return self.facts

    def _require_vocabulary(self) -> Vocabulary:
        if self.vocabulary is None:
            raise RequestError(ErrorCode.NOT_READY, "The tokenizer is not loaded yet.")
        return self.vocabulary

    async def _encode(self, request: GenerationRequest, facts: EngineFacts) -> bytes:
        prompt, options = request.prompt, request.text_options
        is_cut = request.params.truncate_prompt_tokens is not None
        if isinstance(prompt, bytes):
            return prompt
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError(
                    ErrorCode.INVALID_REQUEST, "prompt is empty: give some text.", param="prompt"
                )
            if not is_cut:
                self._refuse_longer_than_fits(len(prompt), facts)
            return await self._text.tokenize(prompt, add_special_tokens=options.add_special_tokens)
        check_chat(prompt)
        if not is_cut:
            self._refuse_longer_than_fits(sum(len(message.content) for message in prompt), facts)
        return await self._text.render(prompt, options)

    def _refuse_longer_than_fits(self, num_characters: int, facts: EngineFacts) -> None:
        """Spare the tokenizer a text that is too long even if all its tokens were the longest."""
        limit = longest_sequence(facts)
        longest = self._require_vocabulary().longest_token_bytes
        if longest and num_characters > limit * longest:
            raise RequestError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"The prompt has {num_characters} characters; this engine holds {limit} tokens of "
                "prompt and output.",
                param="prompt",
            )

    def _submit(self, request: LiveRequest, sample: Sample, sequence: AddSequence) -> None:
        try:
            self._send(sequence)
            self._queue.count(len(sequence.prompt_ids) // 4)
        except ProcessError as error:
            log.warning("refused request=%d: %s", request.request_id, error)
            request.queue.put(sample.end(failure(ErrorCode.NOT_READY)))
            self._forget_if_finished(request)

    def _accept(self, request: LiveRequest, sample: Sample, row: DeltaRow) -> None:
        try:
            sample.learn_prompt_logprobs(row.prompt_logprobs)
            accepted = sample.accept(row.first_index, row.token_ids, row.logprobs, row.reason)
        except ProtocolError as error:
            log.error("our bug, please report: request=%d %s", request.request_id, error)
            request.queue.put(sample.end(failure(ErrorCode.INTERNAL)))
            self._send_abort(request.request_id, sample.sequence.sample)
        else:
            if accepted is None:
                return
            if accepted.delta.error is not None:
                accepted.delta.error = self._queue.explain(accepted.delta.error)
            request.queue.put(accepted.delta)
            if accepted.must_abort:
                self._send_abort(request.request_id, sample.sequence.sample)
        if sample.is_finished:
            self._forget_if_finished(request)

    def _send_abort(self, request_id: int, sample: int) -> asyncio.Future[AbortAck]:
        acknowledged: asyncio.Future[AbortAck] = asyncio.get_running_loop().create_future()
        self._unacknowledged[request_id, sample] = acknowledged
        try:
            self._send(Abort(request_id=request_id, sample=sample))
        except ProcessError as error:
            log.warning("abort not sent request=%d: %s", request_id, error)
            self._settle_abort(_no_ack(request_id, sample))
        return acknowledged

    def _settle_abort(self, ack: AbortAck) -> None:
        acknowledged = self._unacknowledged.pop((ack.request_id, ack.sample), None)
        if acknowledged is not None and not acknowledged.done():
            acknowledged.set_result(ack)

    def _forget_if_finished(self, request: LiveRequest) -> None:
        if request.is_finished:
            self._forget(request)

    def _forget(self, request: LiveRequest) -> None:
        self._requests.pop(request.request_id, None)
        self.news.set()


def _no_ack(request_id: int, sample: int) -> AbortAck:
    """Return what stands for the answer of a scheduler that knows of nothing."""
    return AbortAck(
        request_id=request_id, sample=sample, state=AbortState.UNKNOWN, blocks_returned=0
    )

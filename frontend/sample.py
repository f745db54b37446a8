"""One sample of a request: its tokens so far, its text, and how it ended.

What the scheduler says of a sequence is checked here: tokens that were seen before are dropped, a
gap is an error, and after the end nothing more comes. The tokens are kept, so that the sequence can
be given to a scheduler that has forgotten it.
"""

from array import array
from typing import NamedTuple

import msgspec

from frontend.deltas import SampleDelta, TokenLogprobs
from frontend.generation import PreparedRequest
from frontend.output_text import OutputText
from frontend.stop_strings import StopStrings
from frontend.vocabulary import Vocabulary
from protocol.columns import unpack_int32
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import AddSequence, ErrorInfo, FinishReason

FAILURES = {
    ErrorCode.INVALID_REQUEST: "The engine refuses the request's parameters.",
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: "The prompt leaves no room for an answer.",
    ErrorCode.MODEL_NOT_FOUND: "This engine does not serve that model.",
    ErrorCode.OVERLOADED: "The waiting queue is full; try again in a moment.",
    ErrorCode.NOT_READY: "The engine is starting or stopping.",
    ErrorCode.NUMERIC: "The model computed no numbers for this sequence.",
    ErrorCode.OUT_OF_MEMORY: "The device ran out of memory on the step of this sequence.",
    ErrorCode.TEXT_FAILED: "The text could not be processed.",
    ErrorCode.INTERNAL: "An internal error ended this sequence.",
}


class Accepted(NamedTuple):
    """What a sample makes of a row of tokens."""

    delta: SampleDelta
    must_abort: bool
    """The sample has ended here, and the scheduler does not know it yet."""


class Sample:
    """One sequence, from the frontend's side."""

    def __init__(self, sequence: AddSequence, text: OutputText, *, keeps_stop_token: bool) -> None:
        """`keeps_stop_token`: the text of a final stop token belongs to the output."""
        self.sequence = sequence
        """As it was given to the scheduler."""
        self.output_ids = array("i")
        self.cached_tokens = 0
        self.is_finished = False
        self._prompt_logprobs: list[TokenLogprobs] = []
        """Of the prompt from its second token on, as far as they have come."""
        self._text = text
        stop_ids = () if keeps_stop_token else sequence.params.stop_token_ids
        self._hidden_stop_ids = frozenset(stop_ids)

    def resumed(self) -> AddSequence:
        """Return what gives this sequence, as far as it came, to a scheduler that lacks it."""
        params = self.sequence.params
        if self.output_ids:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            self.sequence,
            params=params,
            resume_ids=self.output_ids.tobytes(),
            next_index=len(self.output_ids),
        )

    def learn_cached_tokens(self, count: int) -> None:
        """Take in how many prompt tokens were found cached when the sequence first started.

        What a resumed sequence finds again is mostly its own, and no news.
        """
        if not self.output_ids:
            self.cached_tokens = count

    def learn_prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        """Take in log-probabilities of the next prompt tokens; those seen before are dropped.

        They are told with the first output. Raises ProtocolError if some were left out.
        """
        for entry in entries:
            if entry.position > 1 + len(self._prompt_logprobs):
                raise ProtocolError(
                    f"The log-probabilities of prompt token {entry.position} came after those of "
                    f"{1 + len(self._prompt_logprobs)} tokens."
                )
            if entry.position == 1 + len(self._prompt_logprobs):
                self._prompt_logprobs.append(entry)

    def accept(
        self,
        first_index: int,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        reason: int,
    ) -> Accepted | None:
        """Take in a row of `TokenDeltas`; None if it says nothing new.

        Raises ProtocolError for a row that leaves out tokens.
        """
        if self.is_finished:
            return None
        known = len(self.output_ids) - first_index
        if known < 0:
            raise ProtocolError(
                f"Tokens from index {first_index} came after {len(self.output_ids)} tokens."
            )
        if known:
            token_ids, logprobs = token_ids[known:], logprobs[known:]
        if not (token_ids or reason):
            return None
        delta = SampleDelta(
            request_id=self.sequence.request_id,
            sample=self.sequence.sample,
            first_index=len(self.output_ids),
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=[] if self.output_ids else self._whole_prompts(),
        )
        must_abort = self._fill(delta, reason)
        self.output_ids.extend(delta.token_ids)
        self.is_finished = delta.is_last
        return Accepted(delta, must_abort)

    def end(self, error: ErrorInfo) -> SampleDelta:
        """End the sample here, whatever the scheduler does; return its last delta."""
        self.is_finished = True
        return SampleDelta(
            request_id=self.sequence.request_id,
            sample=self.sequence.sample,
            first_index=len(self.output_ids),
            text=self._text.flush().text,
            error=error,
        )

    def _whole_prompts(self) -> list[TokenLogprobs]:
        """Return what there is of the prompt's log-probabilities, the first token's place empty."""
        if self.sequence.params.prompt_logprobs is None:
            return []
        (first,) = unpack_int32(self.sequence.prompt_ids[:4])
        return [TokenLogprobs([first], []), *self._prompt_logprobs]

    def _fill(self, delta: SampleDelta, reason: int) -> bool:
        """Set the delta's text and end; return whether the scheduler must be told of the end."""
        shown = delta.token_ids
        if reason == FinishReason.STOP and shown and shown[-1] in self._hidden_stop_ids:
            shown = shown[:-1]
        text, num_tokens, stopped = self._text.push(shown)
        if stopped:
            # What came after the stop string was never asked for.
            delta.token_ids = delta.token_ids[:num_tokens]
            delta.logprobs = delta.logprobs[:num_tokens]
        elif reason:
            rest = self._text.flush()
            text, stopped = text + rest.text, rest.stopped
        delta.text = text
        if stopped:
            delta.finish_reason = FinishReason.STOP
        elif reason >= _FIRST_ERROR:
            delta.error = failure(reason)
        elif reason:
            delta.finish_reason = FinishReason(reason)
        return stopped and not reason


def make_samples(
    request_id: int, prepared: PreparedRequest, vocabulary: Vocabulary
) -> list[Sample]:
    """Return a request's samples before their first token."""
    asked = prepared.params
    stops = StopStrings(asked.stop, keep=asked.include_stop_str_in_output)
    samples = []
    for index, params in enumerate(prepared.sample_params):
        sequence = AddSequence(
            request_id=request_id,
            sample=index,
            prompt_ids=prepared.prompt_ids,
            params=params,
            cache_domain=prepared.cache_domain,
            priority=prepared.priority,
            deadline=prepared.deadline,
        )
        text = OutputText(
            vocabulary.detokenizer(
                skip_special_tokens=asked.skip_special_tokens, after=prepared.prompt_ids
            ),
            stops.scanner() if asked.stop else None,
            min_tokens=asked.min_tokens,
        )
        keeps_stop_token = asked.include_stop_str_in_output
        samples.append(Sample(sequence, text, keeps_stop_token=keeps_stop_token))
    return samples


_FIRST_ERROR = min(ErrorCode)


def failure(code: int) -> ErrorInfo:
    """Return what a client is told about an error that ended a sequence."""
    known = ErrorCode(code) if code in FAILURES else ErrorCode.INTERNAL
    return ErrorInfo(code=known, message=FAILURES[known])

"""What a program gets back: pieces while a request runs, the whole when it has ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from frontend.client.requests import Prompt
from protocol.columns import unpack_float32, unpack_int32
from protocol.errors import EngineError, RequestError
from protocol.messages import (
    CacheReset,
    FinishReason,
    LogprobColumns,
    Output,
    SamplingParams,
    Usage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one sample of a request has produced since its last delta."""

    request_id: int
    """This client's number for the request."""
    sample: int
    """0 to n - 1."""
    first_index: int
    """Index of the first of these tokens in the output."""
    text: str
    """May be empty: text waits until its characters are whole and it is no stop string."""
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None = None
    """For each token: its own id and the most likely others, each with its log-probability."""
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """The same of the prompt's tokens, with the first delta; None for the first of them."""
    finish_reason: FinishReason | None = None
    """Set in the sample's last delta."""
    usage: Usage | None = None
    """Tokens of the prompt and of this sample, with its last delta."""
    params: SamplingParams | None = None
    """The parameters that were in effect, the sample's seed among them; likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Nothing more comes of a request; said exactly once of each."""

    request_id: int
    error: EngineError | None = None
    """Why it failed; None if every sample has a finish reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """Where a request waits that has no output yet."""

    request_id: int
    position: int
    """1: the next to be admitted; 0: it has been."""


Event: TypeAlias = Delta | Ended | Queued
"""What comes of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSample:
    """One of the n answers to a prompt."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    """For each token: its own id and the most likely others, each with its log-probability."""
    prompt_logprobs: list[dict[int, float] | None] | None
    """The same of the prompt's tokens; None for the first of them."""
    finish_reason: FinishReason | None
    """None if it is not finished: its request failed, or is still running."""
    params: SamplingParams | None = None
    """The parameters that were in effect, its seed among them; None likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What came of one prompt."""

    index: int
    """Position of the prompt among the call's."""
    prompt: Prompt
    """As it was given."""
    samples: list[GeneratedSample]
    """n of them."""
    usage: Usage
    """Tokens of the prompt, counted once, and of all finished samples."""
    error: EngineError | None = None
    """Why the request failed, where the call was told to return errors."""

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first sample's tokens."""
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first sample ended."""
        return self.samples[0].finish_reason


@dataclass(slots=True, eq=False)
class _SampleParts:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    params: SamplingParams | None = None


class GenerationBuilder:
    """Puts the deltas of one request together."""

    def __init__(self, index: int, prompt: Prompt, num_samples: int) -> None:
        self.index = index
        self._prompt = prompt
        self._samples = [_SampleParts() for _ in range(num_samples)]

    def add(self, delta: Delta) -> None:
        """Take in the request's next delta."""
        parts = self._samples[delta.sample]
        parts.text.append(delta.text)
        parts.token_ids += delta.token_ids
        if delta.logprobs is not None:
            parts.logprobs = (parts.logprobs or []) + delta.logprobs
        parts.prompt_logprobs = parts.prompt_logprobs or delta.prompt_logprobs
        parts.finish_reason = delta.finish_reason
        parts.usage = delta.usage
        parts.params = delta.params

    def build(self, error: EngineError | None = None) -> Generation:
        """Return what there is so far."""
        usages = [parts.usage for parts in self._samples if parts.usage is not None]
        return Generation(
            index=self.index,
            prompt=self._prompt,
            samples=[
                GeneratedSample(
                    text="".join(parts.text),
                    token_ids=list(parts.token_ids),
                    logprobs=parts.logprobs,
                    prompt_logprobs=parts.prompt_logprobs,
                    finish_reason=parts.finish_reason,
                    params=parts.params,
                )
                for parts in self._samples
            ],
            usage=_total(usages),
            error=error,
        )


def read_output(output: Output) -> Delta:
    """Return an `Output` message as a delta."""
    return Delta(
        request_id=output.request_id,
        sample=output.sample,
        first_index=output.first_index,
        text=output.text,
        token_ids=unpack_int32(output.token_ids),
        logprobs=None if output.logprobs is None else _read_logprobs(output.logprobs),
        prompt_logprobs=(
            None
            if output.prompt_logprobs is None
            else [None, *_read_logprobs(output.prompt_logprobs)]
        ),
        finish_reason=output.finish_reason,
        usage=output.usage,
        params=output.params,
    )


def read_cache_reset(answer: CacheReset) -> int:
    """Return how many blocks were forgotten. Raises RequestError if that is not known."""
    if answer.error is not None:
        raise RequestError(answer.error.code, answer.error.message, param=answer.error.param)
    return answer.blocks_forgotten


def _read_logprobs(columns: LogprobColumns) -> list[dict[int, float]]:
    ids, values = unpack_int32(columns.ids), unpack_float32(columns.values)
    entries, start = [], 0
    for count in unpack_int32(columns.n):
        end = start + count
        # An entry names its own token first and may name it again among the most likely.
        entries.append(dict(zip(ids[start:end], values[start:end], strict=True)))
        start = end
    return entries


def _total(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=usages[0].prompt_tokens if usages else 0,
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=usages[0].cached_tokens if usages else 0,
    )

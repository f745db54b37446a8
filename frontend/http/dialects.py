"""What the two endpoints say differently. Everything else about answering is the same."""

import time
import uuid
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from frontend.deltas import SampleDelta, TokenLogprobs
from frontend.http.logprobs import LogprobWriter
from frontend.http.replies import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    MessageDelta,
    PromptLogprobs,
    PromptTokensDetails,
    SamplingParamsReply,
    UsageReply,
)
from frontend.vocabulary import Vocabulary
from protocol.messages import FinishReason, SamplingParams, Usage
from protocol.sampling import sampling

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "timeout",
}
"""The ends that are answers. A timeout is one if there are tokens: as far as it came."""


class FinishedChoice(msgspec.Struct, kw_only=True):
    """A choice of an answer that is sent whole."""

    text: str = ""
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    token_ids: list[int] = []
    finish_reason: FinishReason = FinishReason.STOP


class Dialect(Protocol):
    """How one endpoint writes what the engine produces."""

    sampling_params: SamplingParamsReply | UnsetType
    """To be told with the answer, or with the first event."""

    def has_begun(self, index: int) -> bool:
        """Return whether a choice has had its first event."""
        ...

    def delta(self, index: int, delta: SampleDelta, usage: Usage | None) -> msgspec.Struct:
        """Return the event of what a choice has gained; usage only where it is asked for."""
        ...

    def finish(self, index: int, reason: FinishReason, usage: Usage | None) -> msgspec.Struct:
        """Return the event of a choice's end."""
        ...

    def usage(self, usage: Usage) -> msgspec.Struct:
        """Return the event of the tokens taken, without choices."""
        ...

    def answer(self, choices: list[FinishedChoice], usage: Usage) -> msgspec.Struct:
        """Return the whole answer."""
        ...


class ChatDialect:
    """/v1/chat/completions. The role comes with a choice's first event."""

    def __init__(
        self,
        model: str,
        vocabulary: Vocabulary,
        num_top: int | None,
        *,
        num_prompt_top: int | None = None,
        names_ids: bool = False,
        show_token_ids: bool,
    ) -> None:
        """`num_top`: candidates to show for each token. None: no log-probabilities.

        `num_prompt_top`: the same of the prompt's tokens; `names_ids`: tokens are called by id.
        """
        self.sampling_params: SamplingParamsReply | UnsetType = UNSET
        self._show_token_ids = show_token_ids
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._begun: set[int] = set()
        self._writer = (
            None if num_top is None else LogprobWriter(vocabulary, num_top, names_ids=names_ids)
        )
        self._prompt_writer = _prompt_writer(vocabulary, num_prompt_top)

    def has_begun(self, index: int) -> bool:
        """Return whether a choice has had its first event."""
        return index in self._begun

    def delta(self, index: int, delta: SampleDelta, usage: Usage | None) -> ChatChunk:
        """Return the event of what a choice has gained."""
        if index in self._begun:
            message = MessageDelta(content=delta.text)
        else:
            self._begun.add(index)
            message = MessageDelta(role="assistant", content=delta.text)
        choice = ChatChunkChoice(
            index=index,
            delta=message,
            logprobs=self._logprobs(delta.logprobs),
            token_ids=delta.token_ids if self._show_token_ids else UNSET,
        )
        return self._chunk([choice], usage)

    def finish(self, index: int, reason: FinishReason, usage: Usage | None) -> ChatChunk:
        """Return the event of a choice's end."""
        choice = ChatChunkChoice(
            index=index, delta=MessageDelta(), finish_reason=FINISH_REASONS[reason]
        )
        return self._chunk([choice], usage)

    def usage(self, usage: Usage) -> ChatChunk:
        """Return the event of the tokens taken."""
        return self._chunk([], usage)

    def answer(self, choices: list[FinishedChoice], usage: Usage) -> ChatCompletion:
        """Return the whole answer."""
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=index,
                    message=AnswerMessage(content=choice.text),
                    logprobs=self._logprobs(choice.logprobs),
                    finish_reason=FINISH_REASONS[choice.finish_reason],
                    token_ids=choice.token_ids if self._show_token_ids else UNSET,
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage_reply(usage),
            prompt_logprobs=_prompt(self._prompt_writer, choices[0]),
            sampling_params=self.sampling_params,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        params, self.sampling_params = self.sampling_params, UNSET
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=_optional(usage),
            sampling_params=params,
        )

    def _logprobs(self, entries: list[TokenLogprobs]) -> ChatLogprobs | None:
        return self._writer.chat(entries) if self._writer else None


class CompletionDialect:
    """/v1/completions. An echoed prompt comes with a choice's first event."""

    def __init__(
        self,
        model: str,
        vocabulary: Vocabulary,
        num_top: int | None,
        echoes: list[str],
        *,
        num_prompt_top: int | None = None,
        echoes_logprobs: bool = False,
        names_ids: bool = False,
        show_token_ids: bool,
    ) -> None:
        """`num_top`, `num_prompt_top` and `names_ids` as for chat.

        `echoes`: what each choice's text begins with; `echoes_logprobs`: whether log-probabilities
        begin with the prompt's.
        """
        self.sampling_params: SamplingParamsReply | UnsetType = UNSET
        self._show_token_ids = show_token_ids
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._echoes = dict(enumerate(echoes))
        self._echoes_logprobs = echoes_logprobs
        self._prompt_writer = _prompt_writer(vocabulary, num_prompt_top)
        self._begun: set[int] = set()
        # Each choice has its own: it counts where in the choice's text a token begins.
        self._writers = {
            index: LogprobWriter(vocabulary, num_top, text_offset=len(echo), names_ids=names_ids)
            for index, echo in enumerate(echoes)
            if num_top is not None
        }

    def has_begun(self, index: int) -> bool:
        """Return whether a choice has had its first event."""
        return index in self._begun

    def delta(self, index: int, delta: SampleDelta, usage: Usage | None) -> Completion:
        """Return the event of what a choice has gained."""
        self._begun.add(index)
        choice = CompletionChoice(
            index=index,
            text=self._echoes.pop(index, "") + delta.text,
            logprobs=self._logprobs(index, delta),
            token_ids=delta.token_ids if self._show_token_ids else UNSET,
        )
        return self._completion([choice], _optional(usage))

    def finish(self, index: int, reason: FinishReason, usage: Usage | None) -> Completion:
        """Return the event of a choice's end."""
        choice = CompletionChoice(index=index, text="", finish_reason=FINISH_REASONS[reason])
        return self._completion([choice], _optional(usage))

    def usage(self, usage: Usage) -> Completion:
        """Return the event of the tokens taken."""
        return self._completion([], usage_reply(usage))

    def answer(self, choices: list[FinishedChoice], usage: Usage) -> Completion:
        """Return the whole answer."""
        finished = [
            CompletionChoice(
                index=index,
                text=self._echoes[index] + choice.text,
                logprobs=self._logprobs(index, choice),
                finish_reason=FINISH_REASONS[choice.finish_reason],
                token_ids=choice.token_ids if self._show_token_ids else UNSET,
                prompt_logprobs=_prompt(self._prompt_writer, choice),
            )
            for index, choice in enumerate(choices)
        ]
        return self._completion(finished, usage_reply(usage))

    def _completion(
        self, choices: list[CompletionChoice], usage: UsageReply | UnsetType
    ) -> Completion:
        params, self.sampling_params = self.sampling_params, UNSET
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            sampling_params=params,
        )

    def _logprobs(
        self, index: int, made: SampleDelta | FinishedChoice
    ) -> CompletionLogprobs | None:
        if not self._writers:
            return None
        prompt = made.prompt_logprobs if self._echoes_logprobs else []
        return self._writers[index].completion(made.logprobs, prompt)


def params_reply(params: SamplingParams) -> SamplingParamsReply:
    """Return a sample's parameters, nothing of which is open any more, as clients read them."""
    chosen = sampling(params)
    return SamplingParamsReply(
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=chosen.min_p,
        repetition_penalty=chosen.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed or 0,
        max_tokens=params.max_tokens or 0,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
    )


def usage_reply(usage: Usage) -> UsageReply:
    """Return the tokens taken, as clients read them."""
    return UsageReply(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


def _prompt_writer(vocabulary: Vocabulary, num_top: int | None) -> LogprobWriter | None:
    return None if num_top is None else LogprobWriter(vocabulary, num_top)


def _prompt(writer: LogprobWriter | None, choice: FinishedChoice) -> PromptLogprobs | UnsetType:
    return writer.prompt(choice.prompt_logprobs) if writer else UNSET


def _optional(usage: Usage | None) -> UsageReply | UnsetType:
    return UNSET if usage is None else usage_reply(usage)

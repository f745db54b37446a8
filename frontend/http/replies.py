"""Bodies of answers, in OpenAI's words."""

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Found in the prefix cache."""


class UsageReply(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens taken."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate for a position. `bytes` lets clients put split characters together."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob, frozen=True, kw_only=True):
    """The token of one position, and its likeliest candidates."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities before temperature, one entry a token."""

    content: list[ContentLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities before temperature, one entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt, like the next."""
    top_logprobs: list[dict[str, float] | None]
    """Candidates by their text, the chosen token always among them."""
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate for a token of the prompt."""

    logprob: float
    rank: int
    """1: the likeliest."""
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt candidates by id, its own among them; null for the first."""


class SamplingParamsReply(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters in effect: those given, the model's defaults and the API's."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    """Of the first choice; given with a request it leads to the same choices."""
    max_tokens: int
    min_tokens: int
    stop_token_ids: list[int]
    """The model's end tokens among them, unless ignore_eos."""


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's turn."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET
    """Where they are asked for."""


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Where they are asked for."""
    sampling_params: SamplingParamsReply | UnsetType = UNSET
    """Where they are asked for."""


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn has gained."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What one sample has gained."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    """Where they are asked for."""


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageReply | UnsetType = UNSET
    sampling_params: SamplingParamsReply | UnsetType = UNSET
    """Where they are asked for; in a stream's first event."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample, or in a stream what it has gained."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    """Where they are asked for."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Where they are asked for."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer of /v1/completions, or one event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply | UnsetType = UNSET
    sampling_params: SamplingParamsReply | UnsetType = UNSET
    """Where they are asked for; in a stream's first event."""


class SamplingDefaultsReply(msgspec.Struct, frozen=True, kw_only=True):
    """What counts where a request leaves something open."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    max_tokens: int | None
    """For chats; null: the room left."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None
    sampling_defaults: SamplingDefaultsReply


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class PrefixCache(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix cache in numbers: what the engine has done since it started, and how it is now."""

    hit_rate: float | None
    """`cached_tokens` of `lookup_tokens`; null before the first."""
    lookup_tokens: int
    cached_tokens: int
    resumed_lookup_tokens: int
    resumed_cached_tokens: int
    shared_blocks: int
    revived_blocks: int
    evicted_blocks: int
    indexed_blocks: int
    free_blocks: int
    cached_blocks: int
    quarantined_blocks: int
    quarantines: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """GET /health: 200 if ready and progressing, else 503."""

    alive: bool
    """This frontend answers."""
    ready: bool
    """A request sent now would be taken."""
    progressing: bool
    """The scheduler's loop comes round."""
    reason: str | None
    """Why it is not ready, or not progressing."""
    live_requests: int
    """At this frontend."""
    waiting_requests: int
    """At the scheduler, as it last said."""
    unacknowledged_aborts: int
    prefix_cache: PrefixCache | None
    """As the scheduler last said; null before."""


class ResetPrefixCacheReply(msgspec.Struct, frozen=True, kw_only=True):
    """POST /reset_prefix_cache."""

    blocks_forgotten: int


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """GET /version."""

    version: str
    protocol_version: int


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """GET /tokenizer_info."""

    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    chat_template: str | None
    chat_templates: list[str]
    """The names of all."""

"""Every message between Tokenwire's processes: schema, validator and documentation in one.

    client    ──Generate, Abort, Status──►  frontend  ──AddSequence, Abort──►  scheduler
    client    ◄─Output, AbortAck, StatusReply─  frontend  ◄─TokenDeltas, AbortAck─  scheduler
    client    ──ResetCache──►  frontend  ──ResetCache──►  scheduler  ──CacheReset──►  back
    client    ◄─QueuePositions─  frontend  ◄─QueuePositions─  scheduler
    scheduler ──StepPlan──►  every rank  ──StepResult──►  scheduler
    frontend  ──TextJob──►  its text process  ──TextDone──►  frontend
    any child ──Ready, Heartbeat, Failure──►  launcher   (an inherited pipe)

A frame is one msgpack array: the tag (the class name), then the fields in the order written here.
The first message in each direction of a connection is `Hello`; every later one starts with
`epoch, seq`. Decoding is the validation: unknown tags, extra fields, wrong types and values out of
bounds are refused. `Ping`, `Resend`, `Reset` and `Drain` control a connection and are not counted:
their `seq` is that of the last counted message their sender has sent, so each also shows a gap.

Integer sequences on the hot path are columns (`protocol.columns`): little-endian int32 unless said
otherwise.
"""

import enum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from protocol.codes import Code
from protocol.errors import ErrorCode

PROTOCOL_VERSION = 4

MAX_FRAME_BYTES = 16 << 20
MAX_MODEL_LEN = 1 << 20
"""Tokens of a sequence. One joins a plan in a frame: its ids, and at worst a block for each."""
"""Largest frame any socket accepts."""
MAX_TEXT_BYTES = 8 << 20
MAX_CHAT_MESSAGES = 1024
MAX_SAMPLES = 64
MAX_STOP_STRINGS = 4
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 18
"""Prompt tokens times values for each: an answer that holds more would not be of use."""
MAX_LOGIT_BIASES = 300
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_IDS = 128
"""Token sequences: a word is one by itself and another after a space."""
MAX_BAD_WORD_TOKENS = 32
MAX_DEADLINE_S = 604_800
"""A week: the longest time limit of a request."""

Int32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=MAX_DEADLINE_S)]
RequestId: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
SampleIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_SAMPLES)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(gt=0, le=2)]
Column: TypeAlias = Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]
ShortText: TypeAlias = Annotated[str, Meta(max_length=1024)]
LongText: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_BYTES)]


class FinishReason(Code):
    """How a sequence ended without an error. Zero in a column of reasons: still running."""

    STOP = 1
    """It produced a stop token, or its text a stop string."""
    LENGTH = 2
    """It reached max_tokens, max_model_len, or all the blocks there are."""
    ABORT = 3
    """Its client no longer wanted it."""
    TIMEOUT = 4
    """Its deadline passed."""


class Role(enum.IntEnum):
    """What kind of process speaks."""

    LAUNCHER = 0
    FRONTEND = 1
    SCHEDULER = 2
    WORKER = 3
    TEXT = 4
    CLIENT = 5


class AbortState(enum.IntEnum):
    """What an aborted sequence was when the abort arrived."""

    UNKNOWN = 0
    LIVE = 1
    FINISHED = 2


class TextKind(enum.IntEnum):
    """What a text job asks for."""

    TOKENIZE = 0
    """Text to token ids."""
    RENDER = 1
    """Chat messages through the model's template to token ids."""
    COMPILE = 2
    """A grammar to its compiled form (reserved)."""


class Part(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Base of what messages are made of: positional, without a tag."""


class Message(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, forbid_unknown_fields=True
):
    """Base of every wire type: immutable, tagged with its class name, positional."""


class Numbered(Message, frozen=True, kw_only=True):
    """A message after `Hello`. Its link fills in both fields when it sends (`protocol.link`)."""

    epoch: Count = 0
    """Incarnation of the engine; a message of another epoch is dropped."""
    seq: Count = 0
    """Counts this direction of this connection from 1."""


# ------------------------------------------------------------------------------
# Parts


class SamplingDefaults(Part, frozen=True, kw_only=True):
    """What counts where SamplingParams leave something open: the model's own, else these."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """None: the room left in the context."""


class SamplingParams(Part, frozen=True, kw_only=True):
    """How to choose output tokens. The scheduler sees it resolved: seed and max_tokens set.

    What a client leaves nil and SamplingDefaults have, the frontend takes from the model's.
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """0 is greedy; below 1e-5 counts as 0."""
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Drop tokens less likely than this share of the most likely one."""
    presence_penalty: Penalty = 0.0
    """Taken from the logit of each token that the output holds."""
    frequency_penalty: Penalty = 0.0
    """Taken from a token's logit once for each time that the output holds it."""
    repetition_penalty: RepetitionPenalty | None = None
    """Divides the logit of each token that prompt or output hold, or multiplies one below 0."""
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIASES)
    ] = {}
    """Added to the logits of tokens."""
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    """The only tokens that may be output. None: all."""
    bad_words: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=MAX_BAD_WORDS)
    ] = []
    """What may not be output; the frontend makes `bad_word_ids` of them and empties them."""
    bad_word_ids: Annotated[
        list[Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]],
        Meta(max_length=MAX_BAD_WORD_IDS),
    ] = []
    """Tokens that may not be output one after the other: after the others the last is banned."""
    seed: Int64 | None = None
    """Any 64-bit integer. None: the frontend draws one."""
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Most output tokens."""
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Output tokens among which there is no stop token, and no stop string counts."""
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    """Samples per prompt; each is its own sequence."""
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=4)
    ] = []
    """Strings that end the output; empty by the time the scheduler sees the sequence."""
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=64)] = []
    """Tokens that end the output. The frontend adds the model's EOS ids unless ignore_eos."""
    ignore_eos: bool = False
    """Do not stop at the model's EOS tokens."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """How many most likely tokens to report beside the chosen one. None: no logprobs."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """The same of the prompt's tokens, all but the first."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Keep so many of the prompt's last tokens; -1: as many as max_tokens leave room for. None by
    the time the scheduler sees the sequence."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    grammar: None = None
    """Reserved."""


class EngineFacts(Part, frozen=True, kw_only=True):
    """What a rank has; from the scheduler: rank 0's, with the smallest num_blocks of all ranks."""

    rank: Annotated[int, Meta(ge=0, lt=1024)]
    back_end: ShortText
    """Attention back end, or "checksum"."""
    block_size: Annotated[int, Meta(ge=1, le=65536)]
    """Token positions a block."""
    num_blocks: Annotated[int, Meta(ge=1, le=2**31 - 2)]
    slots: Annotated[int, Meta(ge=1, le=65536)]
    """Sequences that can run at once."""
    max_model_len: Annotated[int, Meta(ge=1, le=MAX_MODEL_LEN)]
    """Most tokens of prompt and output together."""
    vocab_size: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """Width of the logits: token ids below this are legal."""
    host_blocks: Annotated[int, Meta(ge=0, le=2**31 - 2)] = 0
    """Blocks in the host's memory, for preempted sequences."""
    swap_block_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds that moving a block there or back takes."""


class LogprobColumns(Part, frozen=True, kw_only=True):
    """Log-probabilities before temperature, one entry per scored position."""

    rows: Column = b""
    """[entries] row of the step (`StepResult`) or of the columns (`TokenDeltas`)."""
    positions: Column = b""
    """[entries] index of the scored token in prompt + output."""
    n: Column = b""
    """[entries] alternatives reported, the scored token itself included."""
    ids: Column = b""
    """[sum of n] token ids; each entry starts with its own token."""
    values: Column = b""
    """[sum of n] float32."""
    ranks: Column = b""
    """[entries] how many tokens are as likely as the scored one or more; empty: not counted."""

    def __post_init__(self) -> None:
        ranks = self.ranks or self.rows
        require_equal_lengths(rows=self.rows, positions=self.positions, n=self.n, ranks=ranks)
        require_equal_lengths(ids=self.ids, values=self.values)


class TextOptions(Part, frozen=True, kw_only=True):
    """How text and chats become tokens."""

    add_special_tokens: bool = True
    """For text: whether the tokenizer adds its BOS and the like."""
    template: ShortText = ""
    """For chats, as all that follows: one of the model's templates by its name. Empty: `tool_use`
    where there is one and the variables have tools, else `default`."""
    add_generation_prompt: bool = True
    """Let the prompt end with what begins the model's answer."""
    continue_final_message: bool = False
    """Let it end with the last message, which the answer goes on."""
    variables: LongText = ""
    """A JSON object of what the template gets beside the messages; empty: nothing."""


class ChatMessage(Part, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: LongText


class Usage(Part, frozen=True, kw_only=True):
    """Tokens a request took."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0


class CacheStats(Part, frozen=True, kw_only=True):
    """The prefix cache in numbers: what has been done since the start, and how it is now."""

    lookup_tokens: Count = 0
    """Prompt tokens of sequences admitted for the first time: these were looked up."""
    cached_tokens: Count = 0
    """Those of them that were found, in the index or with another sample of their request."""
    resumed_lookup_tokens: Count = 0
    """Tokens of sequences admitted again, after a preemption or a lost connection."""
    resumed_cached_tokens: Count = 0
    """Those of them that were found: mostly what the sequences had computed themselves."""
    shared_blocks: Count = 0
    """Blocks found, also in exchange for a copy, while another sequence held them."""
    revived_blocks: Count = 0
    """Blocks found, also in exchange for a copy, after their last holder had released them."""
    evicted_blocks: Count = 0
    """Blocks forgotten because their room was needed."""
    indexed_blocks: Count = 0
    """Now: blocks that the index knows, held or free."""
    free_blocks: Count = 0
    """Now: blocks that no sequence holds."""
    cached_blocks: Count = 0
    """Now: those of them that the index knows."""
    quarantined_blocks: Count = 0
    """Now: blocks out of use because something about them did not fit together."""
    quarantines: Count = 0
    """Blocks that ever were; each was logged as our bug."""

    @property
    def hit_rate(self) -> float | None:
        """Share of the tokens looked up that were found; None before the first."""
        return self.cached_tokens / self.lookup_tokens if self.lookup_tokens else None


class ErrorInfo(Part, frozen=True, kw_only=True):
    """A failure as its client sees it."""

    code: ErrorCode
    message: ShortText
    param: ShortText | None = None
    retry_after_s: Count | None = None
    """With OVERLOADED: seconds after which there may be room, as far as that is known."""


class Join(Part, frozen=True, kw_only=True):
    """A sequence enters a slot. The plan holds its first chunk too, and starts its length there."""

    slot: Annotated[int, Meta(ge=0, lt=65536)]
    generation: Count
    """Counts the uses of this slot."""
    token_ids: Column
    """Prompt, then committed output."""
    prompt_len: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    params: SamplingParams
    block_table: Column
    """Blocks held, in order."""

    def __post_init__(self) -> None:
        require_items(4, token_ids=self.token_ids, block_table=self.block_table)


# ------------------------------------------------------------------------------
# Every connection


class Hello(Message, frozen=True, kw_only=True):
    """The first message in each direction of every connection."""

    protocol_version: Count = PROTOCOL_VERSION
    role: Role
    identity: Annotated[bytes, Meta(min_length=1, max_length=64)]
    """Of this incarnation of the process; echoed in logs, never a credential."""
    epoch: Count = 0
    """0: unknown yet, take the peer's."""
    fingerprint: Annotated[str, Meta(max_length=64)] = ""
    """Digest of what all ranks must agree on; empty means: yours."""
    facts: EngineFacts | None = None
    """From a worker: its own. From the scheduler to a frontend: the group's. Else nil."""


class Ping(Numbered, frozen=True, kw_only=True):
    """Says that the sender is there. From the scheduler, also how its waiting queue is."""

    waiting_requests: Count = 0
    waiting_tokens: Count = 0
    max_waiting_requests: Count = 0
    max_waiting_tokens: Count = 0
    retry_after_s: Count = 0
    """Seconds in which what waits now will have been admitted, at the rate of late: 1 to 60."""
    cache: CacheStats | None = None
    """From the scheduler."""


class Resend(Numbered, frozen=True, kw_only=True):
    """Asks for every counted message from `from_seq` on."""

    from_seq: Count


class Reset(Numbered, frozen=True, kw_only=True):
    """Forget this connection and say Hello again."""


class QueuePositions(Numbered, frozen=True, kw_only=True):
    """Where some requests are in the waiting queue. A client hears it of those that stream.

    Of a request with several rows, one for each sample that waits, the least position counts.
    """

    requests: Column
    """[rows] int64 request ids."""
    positions: Column
    """[rows] 1: the next to be admitted; 0: it has been admitted."""

    def __post_init__(self) -> None:
        require_items(8, requests=self.requests)
        require_items(4, positions=self.positions)
        if len(self.requests) != 2 * len(self.positions):
            raise ValueError("requests and positions differ in length")


class Drain(Numbered, frozen=True, kw_only=True):
    """Take nothing new; what runs may finish until the deadline."""

    deadline: float
    """Seconds on the host's monotonic clock."""


# ------------------------------------------------------------------------------
# Client and frontend


class Generate(Numbered, frozen=True, kw_only=True):
    """Generate from one prompt."""

    request_id: RequestId
    """Chosen by the client, unique among its live requests."""
    prompt: LongText | Annotated[list[ChatMessage], Meta(max_length=MAX_CHAT_MESSAGES)] = ""
    """Text or chat messages; empty where prompt_ids is used."""
    prompt_ids: Column = b""
    """Token ids, instead of prompt."""
    params: SamplingParams
    stream: bool = True
    """False: one Output per sample, at its end."""
    priority: Int32 = 0
    """Higher runs first."""
    deadline_s: Seconds | None = None
    """Seconds from its receipt by which every sample ends, if need be with TIMEOUT."""
    text_options: TextOptions = TextOptions()


class Output(Numbered, frozen=True, kw_only=True):
    """What one sample of a request has produced since the last Output."""

    request_id: RequestId
    sample: SampleIndex
    first_index: Count
    """Index of the first of these tokens in the output."""
    text: LongText
    token_ids: Column
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    """Of the prompt from its second token on, in the sample's first Output."""
    finish_reason: FinishReason | None = None
    """Set in the sample's last Output, unless error is."""
    usage: Usage | None = None
    """With the sample's last Output."""
    params: SamplingParams | None = None
    """Likewise, if the sample has run: the parameters that were in effect."""
    error: ErrorInfo | None = None


class Status(Numbered, frozen=True, kw_only=True):
    """Asks how the engine is."""


class StatusReply(Numbered, frozen=True, kw_only=True):
    """How the engine is."""

    model: ShortText
    ready: bool
    facts: EngineFacts | None
    live_requests: Count
    """At this frontend."""
    waiting_requests: Count
    """At the scheduler."""
    cache: CacheStats | None = None
    """As the scheduler last said; nil before."""
    defaults: SamplingDefaults = SamplingDefaults()
    """In effect for requests that leave them open."""


class Abort(Numbered, frozen=True, kw_only=True):
    """The client no longer wants this. Always answered by AbortAck."""

    request_id: RequestId
    sample: Annotated[int, Meta(ge=-1, lt=MAX_SAMPLES)] = -1
    """-1: all samples."""


class AbortAck(Numbered, frozen=True, kw_only=True):
    """An abort has taken effect: nothing more comes of these sequences."""

    request_id: RequestId
    sample: Annotated[int, Meta(ge=-1, lt=MAX_SAMPLES)]
    state: AbortState
    blocks_returned: Count


class ResetCache(Numbered, frozen=True, kw_only=True):
    """Forget every cached prefix: from a client, and from its frontend to the scheduler."""


class CacheReset(Numbered, frozen=True, kw_only=True):
    """Every cached prefix is forgotten: no later sequence starts from what was written before.

    Answers come in the order in which ResetCache came.
    """

    blocks_forgotten: Count
    error: ErrorInfo | None = None
    """To a client: why nothing is known to have been forgotten."""


# ------------------------------------------------------------------------------
# Frontend and its text process


class TextJob(Numbered, frozen=True, kw_only=True):
    """One piece of untrusted text work."""

    job_id: RequestId
    kind: TextKind
    payload: LongText | Annotated[list[ChatMessage], Meta(max_length=MAX_CHAT_MESSAGES)]
    options: TextOptions = TextOptions()


class TextDone(Numbered, frozen=True, kw_only=True):
    """The answer to a text job."""

    job_id: RequestId
    token_ids: Column = b""
    text: LongText = ""
    """For RENDER: the rendered prompt."""
    error: ShortText | None = None
    """A sentence for the client; the other fields are empty then."""


# ------------------------------------------------------------------------------
# Frontend and scheduler


class AddSequence(Numbered, frozen=True, kw_only=True):
    """A new sequence, or one resumed from its committed tokens."""

    request_id: RequestId
    """Unique per frontend."""
    sample: SampleIndex
    prompt_ids: Column
    params: SamplingParams
    """Resolved: seed and max_tokens set, EOS ids among stop_token_ids, no stop strings."""
    cache_domain: Annotated[bytes, Meta(max_length=64)] = b""
    """Prefix-cache blocks are shared only inside one domain."""
    priority: Int32 = 0
    """Higher runs first."""
    deadline: float | None = None
    """Seconds on the host's monotonic clock."""
    resume_ids: Column = b""
    """Output tokens already committed and shown."""
    next_index: Count = 0
    """Index of the first output token the frontend still needs."""

    def __post_init__(self) -> None:
        require_items(4, prompt_ids=self.prompt_ids, resume_ids=self.resume_ids)


class TokenDeltas(Numbered, frozen=True, kw_only=True):
    """New tokens of many sequences, as columns; entry i of every column is about one sequence."""

    requests: Column
    """[rows] int64 request ids."""
    samples: Column
    """[rows]"""
    first_index: Column
    """[rows] index of the row's first token in its output."""
    counts: Column
    """[rows] tokens of the row."""
    token_ids: Column
    """[sum of counts]"""
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    """Of the next prompt tokens of some rows, each row's without gaps."""
    cached_tokens: Column
    """[rows] prompt tokens found in the prefix cache, or taken over from another sample."""
    reasons: Column
    """[rows] 0 while running, else its one terminal reason: a FinishReason or an ErrorCode."""

    def __post_init__(self) -> None:
        require_items(8, requests=self.requests)
        require_equal_lengths(
            samples=self.samples,
            first_index=self.first_index,
            counts=self.counts,
            cached_tokens=self.cached_tokens,
            reasons=self.reasons,
        )
        require_items(4, samples=self.samples, token_ids=self.token_ids)
        if len(self.requests) != 2 * len(self.samples):
            raise ValueError("requests and samples differ in length")


# ------------------------------------------------------------------------------
# Scheduler and ranks


class StepPlan(Numbered, frozen=True, kw_only=True):
    """One step of work. Its rows are its decode rows, then its chunks; results come in that order.

    A rank applies leaves, joins, moves to the host, block copies, moves from the host and new
    blocks, in this order, then computes the rows. A decode row sits at position = length and adds 1
    to it; a chunk starts at length and adds its count.
    """

    step_id: Count
    """Counts plans by one, without gaps."""
    leaves: Column = b""
    """[leaves] slots given up."""
    joins: Annotated[list[Join], Meta(max_length=65536)] = []
    copies: Column = b""
    """[copies, 2] (source block, target block), done in this order."""
    swap_outs: Column = b""
    """[moved, 2] (block, host block): out to the host."""
    swap_ins: Column = b""
    """[moved, 2] (host block, block): back from it."""
    new_blocks: Column = b""
    """[new, 3] (slot, index in its block table, block). Each appends, where the index is the
    table's length, or replaces: a block whose positions are all computed, by one that holds the
    same keys and values."""
    decode: Column | None = b""
    """[decode rows] slots in order; nil: exactly the previous plan's list."""
    chunks: Column = b""
    """[chunks, 4] (slot, start, count, last); last is 1 where the row samples a token."""
    groups: Column | None = None
    """[members, 3] (slot, group, shared blocks): decode rows whose first blocks are the same, each
    in one group at most; nil: exactly the previous plan's groups, none before the first."""

    def __post_init__(self) -> None:
        require_items(4, leaves=self.leaves, decode=self.decode or b"")
        require_items(8, copies=self.copies, swap_outs=self.swap_outs, swap_ins=self.swap_ins)
        require_items(12, new_blocks=self.new_blocks, groups=self.groups or b"")
        require_items(16, chunks=self.chunks)


class StepResult(Numbered, frozen=True, kw_only=True):
    """What one rank did in one step; only rank 0 fills the columns."""

    step_id: Count
    digest: Annotated[int, Meta(ge=0, lt=2**32)]
    """crc32 of (previous digest, the plan's frame, the step's tokens): equal on all ranks."""
    tokens: Column = b""
    """[sum of positive counts] in plan row order."""
    counts: Column = b""
    """[rows] 0: chunk not last; 1; -1: failed."""
    failures: Column = b""
    """[failed rows] their ErrorCodes, in row order."""
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    """Of the prompt tokens that follow those of a row's chunk."""

    def __post_init__(self) -> None:
        require_items(4, tokens=self.tokens, counts=self.counts, failures=self.failures)


# ------------------------------------------------------------------------------
# Child and launcher, over an inherited pipe


class Ready(Message, frozen=True, kw_only=True):
    """The child can serve."""

    detail: Annotated[str, Meta(max_length=4096)] = ""
    """For the frontend: its client endpoint's address."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """The child's main loop came round."""

    step_id: Count = 0


class Failure(Message, frozen=True, kw_only=True):
    """The child is about to exit and says why."""

    exit_code: Annotated[int, Meta(ge=0, le=255)]
    sentence: Annotated[str, Meta(max_length=4096)]


# ------------------------------------------------------------------------------
# One union a channel and direction

ControlMessage: TypeAlias = Ping | Resend | Reset | Drain
ClientToFrontend: TypeAlias = Hello | Generate | Abort | Status | ResetCache | ControlMessage
FrontendToClient: TypeAlias = (
    Hello | Output | QueuePositions | AbortAck | StatusReply | CacheReset | ControlMessage
)
FrontendToText: TypeAlias = Hello | TextJob | ControlMessage
TextToFrontend: TypeAlias = Hello | TextDone | ControlMessage
FrontendToScheduler: TypeAlias = Hello | AddSequence | Abort | ResetCache | ControlMessage
SchedulerToFrontend: TypeAlias = (
    Hello | TokenDeltas | QueuePositions | AbortAck | CacheReset | ControlMessage
)
SchedulerToWorker: TypeAlias = Hello | StepPlan | ControlMessage
WorkerToScheduler: TypeAlias = Hello | StepResult | ControlMessage
ChildToLauncher: TypeAlias = Ready | Heartbeat | Failure


def require_items(size: int, **columns: bytes) -> None:
    """Raise ValueError unless each column is a whole number of items of `size` bytes."""
    for name, column in columns.items():
        if len(column) % size:
            raise ValueError(f"{name} is {len(column)} bytes, not a multiple of {size}")


def require_equal_lengths(**columns: bytes) -> None:
    """Raise ValueError unless all columns are int32 columns of one length."""
    require_items(4, **columns)
    if len({len(column) for column in columns.values()}) > 1:
        raise ValueError(f"{', '.join(columns)} differ in length")

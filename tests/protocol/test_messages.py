"""Frames as bytes: golden fixtures read by an independent decoder, and what the schema refuses."""

import msgpack
import msgspec
import pytest

from protocol import messages as m
from protocol.columns import pack_float32, pack_int32, pack_int64
from protocol.errors import ErrorCode

PARAMS = m.SamplingParams(temperature=0.0, seed=7, max_tokens=3, stop_token_ids=[2])
PARAMS_LIST = [
    *(0.0, None, None, None, 0.0, 0.0, None, {}, None, [], []),
    *(7, 3, 0, 1, [], [2], False, None, None, None, True, False, None),
]
OPTIONS = m.TextOptions(template="rag", add_generation_prompt=False, variables='{"a":1}')
OPTIONS_LIST = [True, "rag", False, False, '{"a":1}']
FACTS = m.EngineFacts(
    rank=0,
    back_end="torch",
    block_size=16,
    num_blocks=9,
    slots=4,
    max_model_len=64,
    vocab_size=50,
    host_blocks=5,
    swap_block_s=0.25,
)
FACTS_LIST = [0, "torch", 16, 9, 4, 64, 50, 5, 0.25]
CACHE = m.CacheStats(lookup_tokens=40, cached_tokens=10, evicted_blocks=5, free_blocks=3)
CACHE_LIST = [40, 10, 0, 0, 0, 0, 5, 0, 3, 0, 0, 0]

# One of each message, and the plain msgpack array it must be on the wire. A change here is a
# change of the protocol: raise PROTOCOL_VERSION with it.
GOLDEN: list[tuple[m.Message, list[object]]] = [
    (
        m.Hello(role=m.Role.WORKER, identity=b"w0", epoch=3, fingerprint="ab", facts=FACTS),
        ["Hello", 4, 3, b"w0", 3, "ab", FACTS_LIST],
    ),
    (
        m.Ping(
            epoch=1,
            seq=2,
            waiting_requests=3,
            waiting_tokens=4,
            max_waiting_requests=5,
            max_waiting_tokens=6,
            retry_after_s=7,
            cache=CACHE,
        ),
        ["Ping", 1, 2, 3, 4, 5, 6, 7, CACHE_LIST],
    ),
    (m.Resend(epoch=1, seq=2, from_seq=2), ["Resend", 1, 2, 2]),
    (m.Reset(epoch=1, seq=2), ["Reset", 1, 2]),
    (
        m.QueuePositions(epoch=1, seq=2, requests=pack_int64([5, 6]), positions=pack_int32([1, 0])),
        [
            *("QueuePositions", 1, 2, b"\x05" + b"\0" * 7 + b"\x06" + b"\0" * 7),
            b"\x01" + b"\0" * 7,
        ],
    ),
    (m.Drain(epoch=1, seq=2, deadline=2.5), ["Drain", 1, 2, 2.5]),
    (
        m.Generate(
            epoch=1,
            seq=1,
            request_id=5,
            prompt=[m.ChatMessage(role="user", content="hi")],
            params=PARAMS,
            priority=-3,
            deadline_s=1.5,
            text_options=OPTIONS,
        ),
        ["Generate", 1, 1, 5, [["user", "hi"]], b"", PARAMS_LIST, True, -3, 1.5, OPTIONS_LIST],
    ),
    (
        m.Output(
            epoch=1,
            seq=1,
            request_id=5,
            sample=0,
            first_index=2,
            text="é",
            token_ids=pack_int32([8]),
            finish_reason=m.FinishReason.STOP,
            usage=m.Usage(prompt_tokens=4, completion_tokens=3, cached_tokens=0),
        ),
        ["Output", 1, 1, 5, 0, 2, "é", b"\x08\0\0\0", None, None, 1, [4, 3, 0], None, None],
    ),
    (m.Status(epoch=1, seq=1), ["Status", 1, 1]),
    (
        m.StatusReply(
            epoch=1,
            seq=1,
            model="m",
            ready=True,
            facts=None,
            live_requests=1,
            waiting_requests=2,
        ),
        ["StatusReply", 1, 1, "m", True, None, 1, 2, None, [1.0, 0, 1.0, 0.0, 1.0, None]],
    ),
    (m.Abort(epoch=1, seq=1, request_id=5), ["Abort", 1, 1, 5, -1]),
    (
        m.AbortAck(
            epoch=1, seq=1, request_id=5, sample=-1, state=m.AbortState.LIVE, blocks_returned=2
        ),
        ["AbortAck", 1, 1, 5, -1, 1, 2],
    ),
    (m.ResetCache(epoch=1, seq=1), ["ResetCache", 1, 1]),
    (m.CacheReset(epoch=1, seq=1, blocks_forgotten=3), ["CacheReset", 1, 1, 3, None]),
    (
        m.TextJob(
            epoch=1,
            seq=1,
            job_id=9,
            kind=m.TextKind.TOKENIZE,
            payload="a b",
            options=m.TextOptions(add_special_tokens=False),
        ),
        ["TextJob", 1, 1, 9, 0, "a b", [False, "", True, False, ""]],
    ),
    (
        m.TextDone(epoch=1, seq=1, job_id=9, token_ids=pack_int32([1, 2])),
        ["TextDone", 1, 1, 9, b"\x01\0\0\0\x02\0\0\0", "", None],
    ),
    (
        m.AddSequence(
            epoch=1, seq=1, request_id=5, sample=0, prompt_ids=pack_int32([1]), params=PARAMS
        ),
        ["AddSequence", 1, 1, 5, 0, b"\x01\0\0\0", PARAMS_LIST, b"", 0, None, b"", 0],
    ),
    (
        m.TokenDeltas(
            epoch=1,
            seq=1,
            requests=pack_int64([5]),
            samples=pack_int32([0]),
            first_index=pack_int32([2]),
            counts=pack_int32([1]),
            token_ids=pack_int32([258]),
            logprobs=m.LogprobColumns(
                rows=pack_int32([0]),
                positions=pack_int32([2]),
                n=pack_int32([1]),
                ids=pack_int32([258]),
                values=pack_float32([-0.5]),
            ),
            cached_tokens=pack_int32([0]),
            reasons=pack_int32([ErrorCode.NUMERIC]),
        ),
        [
            *("TokenDeltas", 1, 1, b"\x05" + b"\0" * 7, b"\0" * 4, b"\x02\0\0\0", b"\x01\0\0\0"),
            b"\x02\x01\0\0",
            [b"\0" * 4, b"\x02\0\0\0", b"\x01\0\0\0", b"\x02\x01\0\0", b"\0\0\0\xbf", b""],
            *(None, b"\0" * 4, b"i\0\0\0"),
        ],
    ),
    (
        m.StepPlan(
            epoch=1,
            seq=4,
            step_id=4,
            leaves=pack_int32([3]),
            joins=[
                m.Join(
                    slot=1,
                    generation=2,
                    token_ids=pack_int32([7]),
                    prompt_len=1,
                    params=PARAMS,
                    block_table=pack_int32([6]),
                )
            ],
            copies=pack_int32([1, 2]),
            swap_outs=pack_int32([4, 0]),
            swap_ins=pack_int32([0, 6]),
            new_blocks=pack_int32([0, 1, 5]),
            decode=None,
            chunks=pack_int32([1, 0, 1, 1]),
            groups=pack_int32([3, 0, 2]),
        ),
        [
            *("StepPlan", 1, 4, 4, b"\x03\0\0\0"),
            [[1, 2, b"\x07\0\0\0", 1, PARAMS_LIST, b"\x06\0\0\0"]],
            b"\x01\0\0\0\x02\0\0\0",
            b"\x04\0\0\0\0\0\0\0",
            b"\0\0\0\0\x06\0\0\0",
            b"\0\0\0\0\x01\0\0\0\x05\0\0\0",
            None,
            b"\x01\0\0\0\0\0\0\0\x01\0\0\0\x01\0\0\0",
            b"\x03\0\0\0\0\0\0\0\x02\0\0\0",
        ],
    ),
    (
        m.StepResult(
            epoch=1,
            seq=4,
            step_id=4,
            digest=2**32 - 1,
            tokens=pack_int32([8]),
            counts=pack_int32([1, -1]),
            failures=pack_int32([ErrorCode.NUMERIC]),
        ),
        [
            *("StepResult", 1, 4, 4, 2**32 - 1, b"\x08\0\0\0"),
            *(b"\x01\0\0\0\xff\xff\xff\xff", b"i\0\0\0", None, None),
        ],
    ),
    (m.Ready(detail="ipc://x"), ["Ready", "ipc://x"]),
    (m.Heartbeat(step_id=4), ["Heartbeat", 4]),
    (m.Failure(exit_code=2, sentence="No."), ["Failure", 2, "No."]),
]

EVERY_MESSAGE = {
    kind
    for kind in vars(m).values()
    if isinstance(kind, type)
    and issubclass(kind, m.Message)
    and kind not in (m.Message, m.Numbered)
}


def test_golden_frames_cover_every_message():
    assert {type(message) for message, _ in GOLDEN} == EVERY_MESSAGE


@pytest.mark.parametrize(("message", "array"), GOLDEN, ids=lambda x: type(x).__name__)
def test_a_frame_is_the_documented_array(message, array):
    frame = msgspec.msgpack.encode(message)
    assert msgpack.unpackb(frame) == array
    assert msgspec.msgpack.decode(frame, type=type(message)) == message


@pytest.mark.parametrize(("message", "array"), GOLDEN, ids=lambda x: type(x).__name__)
def test_an_independent_encoder_is_understood(message, array):
    assert msgspec.msgpack.decode(msgpack.packb(array), type=type(message)) == message


@pytest.mark.parametrize(
    ("array", "complaint"),
    [
        (["Nonsense", 1, 1], "Invalid value 'Nonsense'"),
        (["Ping", 1, 2, 3, 4, 5, 6, 7, None, 9], "Expected `array` of at most length"),
        (["Ping", 1, -1, 3, 4], r"`\$\[2\]`"),
        (["Ping", "1", 2, 3, 4], "Expected `int`, got `str`"),
        (["StepResult", 1, 1, 4, 0, b"\0\0\0"], "tokens is 3 bytes, not a multiple of 4"),
        (["StepPlan", 1, 1, 4, b"", [], b"\0" * 4], "copies is 4 bytes, not a multiple of 8"),
        ({"Ping": 1}, "Expected `array`"),
    ],
)
def test_what_is_no_message_is_refused(array, complaint):
    union = m.SchedulerToWorker | m.StepResult
    with pytest.raises(msgspec.ValidationError, match=complaint):
        msgspec.msgpack.decode(msgpack.packb(array), type=union)


def test_columns_of_deltas_must_agree():
    with pytest.raises(ValueError, match="differ in length"):
        m.TokenDeltas(
            requests=pack_int64([1]),
            samples=pack_int32([0, 0]),
            first_index=pack_int32([0, 0]),
            counts=pack_int32([0, 0]),
            token_ids=b"",
            cached_tokens=pack_int32([0, 0]),
            reasons=pack_int32([0, 0]),
        )


def test_a_steady_decode_step_of_256_sequences_is_a_few_hundred_bytes():
    # 16 of the 256 sequences need a new block, as they do on average with blocks of 16.
    plan = m.StepPlan(epoch=1, seq=9, step_id=9, new_blocks=bytes(12 * 16), decode=None)
    assert len(msgspec.msgpack.encode(plan)) == 220


def test_columns_of_positions_must_agree():
    with pytest.raises(ValueError, match="requests and positions differ in length"):
        m.QueuePositions(requests=pack_int64([1]), positions=b"")

import json

import msgspec

from frontend.http.replies import (
    ChatChunk,
    ChatChunkChoice,
    Completion,
    CompletionChoice,
    MessageDelta,
)


def test_a_chat_chunk_has_nulls_where_clients_look_and_nothing_else_absent():
    chunk = ChatChunk(
        id="i",
        created=1,
        model="m",
        choices=[ChatChunkChoice(index=0, delta=MessageDelta(content="x"))],
    )
    assert json.loads(msgspec.json.encode(chunk)) == {
        "id": "i",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [
            {"index": 0, "delta": {"content": "x"}, "logprobs": None, "finish_reason": None}
        ],
    }


def test_a_completion_is_its_own_chunk():
    chunk = Completion(id="i", created=1, model="m", choices=[CompletionChoice(index=0, text="x")])
    assert json.loads(msgspec.json.encode(chunk)) == {
        "id": "i",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": "x", "logprobs": None, "finish_reason": None}],
    }

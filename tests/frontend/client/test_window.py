"""The window follows what the engine says it has."""

import msgspec
import pytest

from frontend.client.window import FIRST_WINDOW, MAX_WINDOW, window_for
from protocol.messages import EngineFacts, StatusReply

FACTS = EngineFacts(
    rank=0,
    back_end="checksum",
    block_size=16,
    num_blocks=100,
    slots=4,
    max_model_len=512,
    vocab_size=1000,
)


@pytest.mark.parametrize(("slots", "window"), [(1, 2), (64, 128), (256, 512), (5000, MAX_WINDOW)])
def test_twice_what_runs_at_once(slots, window):
    facts = msgspec.structs.replace(FACTS, slots=slots)
    status = StatusReply(model="m", ready=True, facts=facts, live_requests=0, waiting_requests=0)
    assert window_for(status) == window


def test_an_engine_that_is_starting_gets_a_guess():
    status = StatusReply(model="m", ready=False, facts=None, live_requests=0, waiting_requests=0)
    assert window_for(status) == FIRST_WINDOW

"""How many sequences a client has at the engine at once."""

from protocol.messages import StatusReply

FIRST_WINDOW = 64
"""Until the engine has told what it has."""
MAX_WINDOW = 2048
"""Half of what a frontend accepts by default: two clients fit."""


def window_for(status: StatusReply) -> int:
    """Return twice what the engine runs at once: it never waits for the client, and more than
    that would only wait there instead of here.
    """
    return FIRST_WINDOW if status.facts is None else min(2 * status.facts.slots, MAX_WINDOW)

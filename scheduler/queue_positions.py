"""What frontends are told of where their sequences wait, some of them at a time."""

from protocol.columns import pack_int32, pack_int64
from protocol.messages import QueuePositions
from scheduler.waiting_queue import Place

MAX_POSITIONS = 512
"""Waiting sequences told of at a time, 12 bytes each; of more, every one has its turn."""


def position_reports(places: list[Place]) -> list[tuple[bytes, QueuePositions]]:
    """Return places as a message for each frontend that has one of these sequences."""
    by_source: dict[bytes, list[Place]] = {}
    for place in places:
        by_source.setdefault(place.sequence.key.source, []).append(place)
    return [
        (
            source,
            QueuePositions(
                requests=pack_int64([place.sequence.key.request_id for place in group]),
                positions=pack_int32([place.position for place in group]),
            ),
        )
        for source, group in by_source.items()
    ]

from protocol.columns import unpack_int32, unpack_int64
from scheduler.queue_positions import MAX_POSITIONS, position_reports
from scheduler.waiting_queue import Place
from tests.scheduler.simulation import make_sequence


def test_a_message_for_each_frontend_that_has_any():
    places = [
        Place(make_sequence(number, 1, request_id=number, source=source), number + 1)
        for number, source in enumerate([b"a", b"b", b"a"])
    ]
    (a, first), (b, second) = position_reports(places)
    assert (a, unpack_int64(first.requests), unpack_int32(first.positions)) == (
        b"a",
        [0, 2],
        [1, 3],
    )
    assert (b, unpack_int64(second.requests), unpack_int32(second.positions)) == (b"b", [1], [2])
    assert position_reports([]) == []


def test_a_full_report_is_six_kilobytes():
    places = [Place(make_sequence(n, 1, request_id=n), n + 1) for n in range(MAX_POSITIONS)]
    ((_, report),) = position_reports(places)
    assert len(report.requests) + len(report.positions) == 6_144

import pytest

from protocol.columns import unpack_int32, unpack_int64
from scheduler.slot_table import NEVER, RECENT_TOKENS, SlotTable
from tests.scheduler.simulation import make_sequence


def running(table, arrival=0, *, source=b"frontend", cached_tokens=0, sample=0):
    sequence = make_sequence(arrival, 3, request_id=100 + arrival, source=source, sample=sample)
    sequence.cached_tokens = cached_tokens
    table.take(sequence)
    return sequence


def commit(table, sequence, *tokens):
    for token in tokens:
        index = table.output_index[sequence.slot]
        table.recent[sequence.slot, index & (RECENT_TOKENS - 1)] = token
        table.output_index[sequence.slot] += 1


def test_slots_are_given_out_from_the_lowest_and_come_back():
    table = SlotTable(2)
    one, two = running(table, 0), running(table, 1)
    assert (one.slot, two.slot, table.num_free, table.num_running) == (0, 1, 0, 2)
    assert table.running() == [one, two]
    assert table.give_back(one) == 0
    assert (one.slot, table.num_free, table.running()) == (None, 1, [two])


def test_giving_a_slot_back_raises_its_generation():
    table = SlotTable(2)
    one = running(table)
    assert table.holds(0, 0)
    assert table.changes == 0
    table.give_back(one)
    assert not table.holds(0, 0)
    assert table.holds(0, 1)
    assert table.changes == 1
    with pytest.raises(AssertionError, match="no slot to give back"):
        table.give_back(one)


def test_a_sequence_takes_its_tokens_over_when_it_is_synchronised():
    table = SlotTable(1)
    one = running(table)
    commit(table, one, 7, 8)
    assert list(one.tokens) == [0, 1, 2]
    table.sync(one)
    assert list(one.tokens) == [0, 1, 2, 7, 8]
    assert one.num_computed == 4
    table.sync(one)
    assert list(one.tokens) == [0, 1, 2, 7, 8]


def test_recent_tokens_go_round():
    table = SlotTable(1)
    one = running(table)
    commit(table, one, *range(50))
    table.sync(one)
    commit(table, one, *range(50, 50 + RECENT_TOKENS))
    table.give_back(one)
    assert list(one.tokens) == [0, 1, 2, *range(50 + RECENT_TOKENS)]


def test_a_sequence_is_looked_at_before_its_tokens_overflow_or_at_its_end():
    table = SlotTable(1)
    one = running(table)
    assert table.commit_event[0] == RECENT_TOKENS
    assert table.plan_event[0] == NEVER
    one.max_tokens = 13
    table.expect_output(one)
    assert table.commit_event[0] == 10


def test_rows_are_slots_in_order_as_they_are_in_use():
    table = SlotTable(4)
    for arrival in range(3):
        running(table, arrival)
    table.give_back(table.sequence(1))
    running(table, 7)
    rows = table.rows([2, 1])
    assert len(rows) == 2
    assert unpack_int32(rows.column()) == [2, 1]
    assert rows.generations.tolist() == [0, 1]
    assert unpack_int32(rows.ones) == [1, 1]


def test_an_audience_has_the_columns_that_do_not_change_by_step():
    table = SlotTable(4)
    for arrival in range(3):
        running(table, arrival, cached_tokens=arrival, sample=arrival % 2)
    rows = table.rows([2, 0])
    (audience,) = table.audiences(rows)
    assert (audience.source, audience.picks) == (b"frontend", None)
    assert unpack_int64(audience.requests) == [102, 100]
    assert unpack_int32(audience.samples) == [0, 0]
    assert unpack_int32(audience.cached_tokens) == [2, 0]
    assert unpack_int32(audience.ones) == [1, 1]
    assert unpack_int32(audience.zeros) == [0, 0]
    assert table.audiences(rows) is table.audiences(rows)


def test_each_frontend_is_an_audience_of_its_own_rows():
    table = SlotTable(4)
    for arrival, source in enumerate([b"a", b"b", b"a"]):
        running(table, arrival, source=source)
    first, second = table.audiences(table.rows([0, 1, 2]))
    assert (first.source, first.picks.tolist()) == (b"a", [0, 2])
    assert unpack_int64(first.requests) == [100, 102]
    assert (second.source, second.picks.tolist()) == (b"b", [1])


def test_a_frontend_without_running_sequences_is_forgotten():
    table = SlotTable(2)
    for turn in range(5):
        table.give_back(running(table, source=b"frontend-%d" % turn))
    assert table._source_names == table._source_numbers == table._source_uses == {}


def test_no_rows_have_no_audience():
    table = SlotTable(2)
    rows = table.rows([])
    assert (len(rows), rows.column(), table.audiences(rows)) == (0, b"", [])


def test_a_free_slot_has_no_sequence():
    with pytest.raises(AssertionError, match="slot 1 is free"):
        SlotTable(2).sequence(1)

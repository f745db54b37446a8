from scheduler.admission_rate import LONGEST_S, SHORTEST_S, AdmissionRate


def observed(*moments):
    """A rate that has seen (seconds, admitted tokens, waiting tokens)."""
    rate = AdmissionRate()
    for now, admitted, waiting in moments:
        rate.observe(now, admitted_tokens=admitted, waiting_tokens=waiting)
    return rate


def test_the_time_is_the_tokens_that_wait_over_the_rate():
    rate = observed((5.0, 1000, 300), (6.0, 1100, 300), (7.0, 1200, 300))
    assert [rate.retry_after_s(tokens) for tokens in (1, 100, 101, 1000)] == [1, 1, 2, 10]


def test_it_is_within_bounds_and_the_shortest_where_nothing_is_known():
    rate = observed((0.0, 0, 5), (1.0, 10, 5))
    assert rate.retry_after_s(600) == rate.retry_after_s(10**9) == LONGEST_S
    assert rate.retry_after_s(0) == SHORTEST_S
    assert observed((0.0, 0, 50)).retry_after_s(50) == SHORTEST_S


def test_where_nothing_is_admitted_it_takes_as_long_again():
    assert observed((0.0, 0, 5), (1.0, 0, 5)).retry_after_s(10**6) == 1
    assert observed((0.0, 0, 5), (7.5, 0, 5)).retry_after_s(1) == 8
    # What is remembered fades, and so does how long that was.
    assert observed(*((float(second), 0, 5) for second in range(500))).retry_after_s(1) == 11


def test_what_empties_the_queue_counts():
    # A queue of one is empty after every admission.
    moments = [(0.0, 0, 40), (4.0, 40, 0), (4.1, 40, 40), (8.1, 80, 0), (8.2, 80, 40)]
    assert observed(*moments).retry_after_s(40) == 4


def test_time_in_which_nobody_waits_does_not_count():
    rate = observed((0.0, 0, 9), (1.0, 100, 9), (2.0, 200, 0), (50.0, 201, 9), (51.0, 301, 9))
    assert rate.retry_after_s(1000) == 10


def test_what_is_long_ago_weighs_little():
    moments = [(float(second), 1000 * second, 9) for second in range(30)]
    moments += [(29.0 + second, 29_000 + 10 * second, 9) for second in range(1, 61)]
    # 10 tokens a second for a minute, and 1,000 before that: it counts as 12.
    assert observed(*moments).retry_after_s(492) == 40

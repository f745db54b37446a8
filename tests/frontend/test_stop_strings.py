import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.stop_strings import StopStrings

letters = st.text(alphabet="ab😀", max_size=30)
stops_of_few_letters = st.lists(
    st.text(alphabet="ab😀", min_size=1, max_size=4), min_size=1, max_size=4
)


def expected(text, stops, *, keep):
    """The definition, letter by letter: the first to be complete, of those the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end if keep else end - max(map(len, complete))], True
    return text, False


def scan_all(text, stops, *, keep, seed):
    scanner = StopStrings(stops, keep=keep).scanner()
    source = random.Random(seed)
    shown = ""
    while text:
        size = source.randint(1, 5)
        scanned = scanner.scan(text[:size])
        shown += scanned.text
        if scanned.stopped:
            return shown, True
        text = text[size:]
    return shown + scanner.flush(), False


@settings(max_examples=1000, deadline=None)
@given(letters, stops_of_few_letters, st.booleans(), st.integers(0, 2**32))
def test_found_and_cut_exactly_however_the_text_is_split(text, stops, keep, seed):
    assert scan_all(text, stops, keep=keep, seed=seed) == expected(text, stops, keep=keep)


@settings(max_examples=300, deadline=None)
@given(letters, stops_of_few_letters)
def test_no_more_is_held_back_than_may_start_a_stop_string(text, stops):
    scanner = StopStrings(stops, keep=False).scanner()
    shown = ""
    for place, letter in enumerate(text, 1):
        scanned = scanner.scan(letter)
        shown += scanned.text
        if scanned.stopped:
            return
        held = text[len(shown) : place]
        longest = max(
            (
                size
                for stop in stops
                for size in range(1, len(stop))
                if text[:place].endswith(stop[:size])
            ),
            default=0,
        )
        assert len(held) == longest


def test_a_stop_string_across_tokens_and_characters_is_never_shown():
    scanner = StopStrings(["\n\nUser:", "終わり"], keep=False).scanner()
    shown = [scanner.scan(part) for part in ["Hi", "\n", "\n", "Us", "ually 終", "わ", "りx"]]
    assert [part.text for part in shown] == ["Hi", "", "", "", "\n\nUsually ", "", ""]
    assert [part.stopped for part in shown] == [False] * 6 + [True]


def test_what_was_held_comes_out_at_the_end():
    scanner = StopStrings(["a long stop string"], keep=False).scanner()
    assert scanner.scan("this is a long stop").text == "this is "
    assert scanner.flush() == "a long stop"
    assert scanner.flush() == ""


@pytest.mark.parametrize(("keep", "text"), [(False, "say "), (True, "say END")])
def test_the_stop_string_itself_is_kept_only_if_asked_for(keep, text):
    scanner = StopStrings(["END"], keep=keep).scanner()
    assert scanner.scan("say END and more") == (text, True)


def test_a_kept_stop_string_holds_nothing_back():
    scanner = StopStrings(["END"], keep=True).scanner()
    assert scanner.scan("EN") == ("EN", False)
    assert scanner.scan("D!") == ("D", True)


def test_samples_do_not_share_what_they_have_read():
    stops = StopStrings(["ab"], keep=False)
    first, second = stops.scanner(), stops.scanner()
    assert first.scan("a") == ("", False)
    assert second.scan("b") == ("b", False)
    assert first.scan("b") == ("", True)

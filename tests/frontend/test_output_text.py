import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.detokenizer import ByteLevelDetokenizer
from frontend.output_text import OutputText
from frontend.stop_strings import StopStrings

PIECES = {0: b"Hello", 1: b" wor", 2: b"ld", 3: b"\n", 4: b"\xf0\x9f", 5: b"\x98\x80", 6: b""}


def output(*stops, min_tokens=0, keep=False):
    scanner = StopStrings(stops, keep=keep).scanner() if stops else None
    return OutputText(ByteLevelDetokenizer(PIECES), scanner, min_tokens=min_tokens)


def test_without_stop_strings_all_text_comes_at_once():
    text = output()
    assert text.push([0, 1, 2, 4]) == ("Hello world", 4, False)
    assert text.push([5]) == ("😀", 1, False)
    assert text.push([4]) == ("", 1, False)
    assert text.flush() == ("\ufffd", 0, False)


def test_tokens_are_counted_up_to_the_one_that_completes_the_stop_string():
    text = output("world")
    assert text.push([0, 1, 2, 3, 3]) == ("Hello ", 3, True)


def test_a_stop_string_across_pieces_of_a_character():
    text = output("😀")
    assert text.push([0, 4]) == ("Hello", 2, False)
    assert text.push([5, 0]) == ("", 1, True)


@pytest.mark.parametrize("split", [1, 2, 5])
def test_a_stop_string_within_the_first_min_tokens_does_not_count(split):
    text = output("\n", min_tokens=2)
    ids = [3, 3, 0, 3, 0]
    shown, tokens = "", 0
    for place in range(0, len(ids), split):
        delta = text.push(ids[place : place + split])
        shown, tokens = shown + delta.text, tokens + delta.num_tokens
        if delta.stopped:
            break
    assert (shown, tokens) == ("\n\nHello", 4)


def test_the_boundary_of_min_tokens_is_no_part_of_a_stop_string():
    text = output("\n\n", min_tokens=1)
    assert text.push([3]) == ("\n", 1, False)
    assert text.push([3]) == ("", 1, False)
    assert text.push([0]) == ("\nHello", 1, False)


def test_held_text_is_flushed():
    text = output("Hello world!")
    assert text.push([0, 1]) == ("", 2, False)
    assert text.flush() == ("Hello wor", 0, False)


def test_a_stop_string_can_be_complete_with_the_last_replacement_character():
    text = output("\ufffd")
    assert text.push([0, 4]) == ("Hello", 2, False)
    assert text.flush() == ("", 0, True)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 6), max_size=12),
    stops=st.lists(st.sampled_from(["lo", "o w", "d\n", "😀", "Hello w", "\n\n"]), max_size=3),
    min_tokens=st.integers(0, 4),
    sizes=st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
def test_splitting_the_tokens_changes_nothing(ids, stops, min_tokens, sizes):
    def run(parts):
        text = output(*stops, min_tokens=min_tokens)
        shown, tokens = "", 0
        for part in parts:
            delta = text.push(part)
            shown, tokens = shown + delta.text, tokens + delta.num_tokens
            if delta.stopped:
                return shown, tokens, True
        rest = text.flush()
        return shown + rest.text, tokens, rest.stopped

    parts, rest = [], ids
    for size in sizes:
        parts.append(rest[:size])
        rest = rest[size:]
    assert run(parts) == run([[token_id] for token_id in ids])

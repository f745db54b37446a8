import pytest

from protocol.plain_line import plain_line


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("", ""),
        ("Größe: 5 µs 😀", "Größe: 5 µs 😀"),
        ("a\n12:00:00 E forged\r\n", "a\\n12:00:00 E forged\\r\\n"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\u2028 \u202e \ud800", "\\u2028 \\u202e \\ud800"),
        ("x" * 20, "x" * 10 + "…"),
    ],
)
def test_it_is_one_visible_line_of_bounded_length(text, plain):
    assert plain_line(text, 10 if len(text) == 20 else 100) == plain

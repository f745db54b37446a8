"""The text of one sequence: detokenizing and stop strings together.

A stop string only counts in text that comes after the first `min_tokens` tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

from frontend.detokenizer import Detokenizer
from frontend.stop_strings import StopScanner


class TextDelta(NamedTuple):
    """What new tokens add to the text."""

    text: str
    num_tokens: int
    """Tokens read; fewer than given when a stop string was complete before the last."""
    stopped: bool


class OutputText:
    """Turns the tokens of one sequence into the text its client sees."""

    def __init__(
        self, detokenizer: Detokenizer, scanner: StopScanner | None, *, min_tokens: int
    ) -> None:
        """`scanner` is None for a request without stop strings."""
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._unscanned_tokens = min_tokens

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Return the text that these tokens complete."""
        if self._scanner is None:
            return TextDelta(self._detokenizer.push(token_ids), len(token_ids), stopped=False)
        text = ""
        # One by one, so that the count of tokens up to the stop string is exact.
        for count, token_id in enumerate(token_ids, 1):
            delta = self._detokenizer.push([token_id])
            if self._unscanned_tokens:
                self._unscanned_tokens -= 1
                text += delta
                continue
            scanned = self._scanner.scan(delta)
            text += scanned.text
            if scanned.stopped:
                return TextDelta(text, count, stopped=True)
        return TextDelta(text, len(token_ids), stopped=False)

    def flush(self) -> TextDelta:
        """Return the text still held, at the sequence's end."""
        rest = self._detokenizer.flush()
        if self._scanner is None:
            return TextDelta(rest, 0, stopped=False)
        scanned = self._scanner.scan(rest)
        held = "" if scanned.stopped else self._scanner.flush()
        return TextDelta(scanned.text + held, 0, stopped=scanned.stopped)

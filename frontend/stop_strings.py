"""Stop strings: found wherever they fall, across tokens and characters, and cut exactly.

Text that may be the start of a stop string is held back, and given out once it cannot be one any
more. Of several stop strings, the one that is complete first ends the output; of those complete at
the same character, the longest. So how text is split into tokens changes nothing.

The search is Knuth, Morris and Pratt's: for each stop string, how much of it the text ends with.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Scanned(NamedTuple):
    """What a scanner makes of a piece of text."""

    text: str
    """Safe to show."""
    stopped: bool
    """A stop string is complete: nothing comes after this."""


class StopStrings:
    """The stop strings of a request, prepared once for all its samples."""

    def __init__(self, stops: Sequence[str], *, keep: bool) -> None:
        """`stops` are not empty. `keep`: leave the stop string in the text."""
        self.patterns = tuple(dict.fromkeys(stops))
        self.borders = tuple(_borders(pattern) for pattern in self.patterns)
        self.keep = keep

    def scanner(self) -> "StopScanner":
        """Return a fresh scanner for one sequence."""
        return StopScanner(self)


class StopScanner:
    """Reads the text of one sequence."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._progress = [0] * len(stops.patterns)
        """How many characters of each stop string the text ends with."""
        self._held = ""

    def scan(self, text: str) -> Scanned:
        """Read more text; what may start a stop string is held back."""
        for place, letter in enumerate(text):
            found = self._step(letter)
            if found:
                end = len(self._held) + place + 1
                shown = self._held + text
                return Scanned(shown[: end if self._stops.keep else end - found], stopped=True)
        held = 0 if self._stops.keep else max(self._progress)
        text = self._held + text
        self._held = text[len(text) - held :]
        return Scanned(text[: len(text) - held], stopped=False)

    def flush(self) -> str:
        """Return what is held: no more text comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, letter: str) -> int:
        """Read one character; return the length of the stop string that it completes, or 0."""
        found = 0
        for which, pattern in enumerate(self._stops.patterns):
            progress = self._progress[which]
            borders = self._stops.borders[which]
            while progress and pattern[progress] != letter:
                progress = borders[progress - 1]
            progress += pattern[progress] == letter
            if progress == len(pattern):
                found = max(found, progress)
            self._progress[which] = progress
        return found


def _borders(pattern: str) -> tuple[int, ...]:
    """Return, for each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    border = 0
    for place in range(1, len(pattern)):
        while border and pattern[border] != pattern[place]:
            border = borders[border - 1]
        border += pattern[border] == pattern[place]
        borders[place] = border
    return tuple(borders)

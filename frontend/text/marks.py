"""Telling the template's special tokens from those that a user merely spells.

A user who writes `<|im_end|>` must not end his turn. So before a template sees the messages, every
spelling of a special token in them gets a mark after its first letter, and so does what could be
the start of one at the end of a message. A mark is a character that occurs nowhere else. After
rendering, the marks are taken out, and a spelling that had one inside is the user's.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from protocol.errors import ErrorCode, RequestError
from protocol.messages import ChatMessage

_PRIVATE_USE = range(0xE000, 0xF900)


class Marked(NamedTuple):
    """What a template is given."""

    messages: list[ChatMessage]
    mark: str
    end: str
    """Another character that occurs nowhere, to find the end of a message by."""
    variables: dict[str, object]


class Unmarked(NamedTuple):
    """A rendered prompt without its marks."""

    text: str
    marks: frozenset[int]
    """Places in the text that a mark stood before."""

    def is_users(self, start: int, end: int) -> bool:
        """Return whether text[start:end], a special token's spelling, was written by a user."""
        inside = range(start + 1, max(end, start + 2))
        return any(place in self.marks for place in inside)


class SpecialMarker:
    """Marks the special tokens of one tokenizer in messages."""

    def __init__(self, special_texts: Iterable[str], template: str) -> None:
        """`template`: the chat template's source, to keep clear of its characters."""
        texts = sorted((text for text in special_texts if text), key=len, reverse=True)
        self._single = frozenset(text for text in texts if len(text) == 1)
        longer = [text for text in texts if len(text) > 1]
        self._starts = frozenset(text[:length] for text in longer for length in range(1, len(text)))
        self._longest = max(map(len, longer), default=0)
        # An empty alternation would match everywhere: this one matches nowhere.
        self._longer = re.compile("|".join(map(re.escape, longer)) or r"(?!)")
        self._taken = frozenset(template)

    def mark(
        self, messages: Sequence[ChatMessage], variables: Mapping[str, object] | None = None
    ) -> Marked:
        """Return messages and variables with marks in their texts.

        Raises RequestError if they leave no character for the mark.
        """
        given = variables or {}
        taken = self._taken.union(*(message.content for message in messages), *_texts(given))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in taken)
        mark, end = next(free, None), next(free, None)
        if mark is None or end is None:
            raise RequestError(
                ErrorCode.TEXT_FAILED,
                "The messages use every private-use character: leave two unused.",
                param="messages",
            )
        marked = [
            ChatMessage(role=message.role, content=self._mark_text(message.content, mark))
            for message in messages
        ]
        return Marked(
            marked,
            mark,
            end,
            {name: self._mark_value(value, mark) for name, value in given.items()},
        )

    def _mark_value(self, value: object, mark: str) -> object:
        match value:
            case str():
                return self._mark_text(value, mark)
            case list():
                return [self._mark_value(item, mark) for item in value]
            case dict():
                return {
                    self._mark_text(key, mark): self._mark_value(item, mark)
                    for key, item in value.items()
                }
            case _:
                return value

    def _mark_text(self, text: str, mark: str) -> str:
        # Breaking one spelling can leave another that overlapped it.
        while self._longer.search(text):
            text = self._longer.sub(lambda found: found[0][0] + mark + found[0][1:], text)
        for letter in self._single:
            text = text.replace(letter, letter + mark)
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._starts:
                place = len(text) - length + 1
                return text[:place] + mark + text[place:]
        return text


def cut_after_final_message(rendered: str, end: str) -> str:
    """Return a rendered prompt up to the end of its last message.

    That message's content was given with `end` and a space behind it. Where a template trims, the
    space is gone, and what a trimming template would leave of the content counts. Raises
    RequestError if the template does not show the message.
    """
    place = rendered.rfind(end)
    if place < 0:
        raise RequestError(
            ErrorCode.TEXT_FAILED,
            "The model's chat template does not show the final message as it is, so that it "
            "cannot be continued.",
            param="continue_final_message",
        )
    before, behind = rendered[:place], rendered[place + len(end) :]
    return before if behind.startswith(" ") else before.rstrip()


def _texts(value: object) -> Iterator[str]:
    """Yield all texts of a JSON value."""
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _texts(item)
        case dict():
            for key, item in value.items():
                yield key
                yield from _texts(item)
        case _:
            pass


def unmark(rendered: str, mark: str) -> Unmarked:
    """Take the marks out of a rendered prompt."""
    parts = rendered.split(mark)
    places: set[int] = set()
    place = 0
    for part in parts[:-1]:
        place += len(part)
        places.add(place)
    return Unmarked("".join(parts), frozenset(places))

"""Token ids to text, piece by piece: what is said once is never taken back.

The deltas of one sequence, joined, equal the decoding of all its tokens at once, exactly. A delta
therefore never ends inside a character: the bytes of an unfinished one wait for the next token.
Each call costs what its new tokens cost, however long the sequence is.
"""

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

BYTE_LEVEL_ALPHABET: Mapping[str, int]
"""The 256 printable letters in which byte-level tokenizers write bytes."""


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        ...

    def flush(self) -> str:
        """Return what is still held, at the end of the sequence."""
        ...


class ByteLevelDetokenizer:
    """Text is the bytes of all pieces, read as UTF-8; a byte that fits nowhere becomes U+FFFD."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        """`pieces` has an entry for every id, empty for what is not shown."""
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        pieces = self._pieces
        return self._decode(b"".join([pieces[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        """Return what is still held: U+FFFD for an unfinished character."""
        return self._decode(b"", True)


class SentencePieceDetokenizer:
    """Text is the pieces' text; a run of byte pieces is UTF-8 if all of it is, else all U+FFFD.

    A run is held until a text piece ends it, because its last byte decides about its first.
    """

    def __init__(
        self,
        pieces: Mapping[int, str | bytes],
        *,
        strip: str = "",
        strip_count: int = 0,
        first: Mapping[int, str | bytes] | None = None,
    ) -> None:
        """`pieces` has an entry for every id: text, one byte, or "" for what is not shown.

        At most `strip_count` characters `strip` are dropped from the start of the text. `first`
        has the pieces that count for the first token shown, where these are others.
        """
        self._pieces = pieces
        self._run = bytearray()
        self._strip = strip
        self._left_to_strip = strip_count
        self._first = first

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        out: list[str] = []
        for token_id in token_ids:
            piece = self._pieces[token_id]
            if self._first is not None and piece:
                piece, self._first = self._first[token_id], None
            if isinstance(piece, bytes):
                self._run += piece
            elif piece:
                if self._run:
                    out.append(self._end_run())
                out.append(piece)
        return self._strip_start("".join(out))

    def flush(self) -> str:
        """Return what is still held."""
        return self._strip_start(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip_start(self, text: str) -> str:
        while text and self._left_to_strip:
            if not text.startswith(self._strip):
                self._left_to_strip = 0
                break
            text = text[len(self._strip) :]
            self._left_to_strip -= 1
        return text


class SilentDetokenizer:
    """Says nothing: for a model without a tokenizer, whose clients use token ids."""

    def push(self, token_ids: Sequence[int]) -> str:  # noqa: ARG002
        """Return no text."""
        return ""

    def flush(self) -> str:
        """Return no text."""
        return ""


def _byte_level_alphabet() -> dict[str, int]:
    """Visible Latin-1 letters stand for themselves, the other bytes for U+0100 and up, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()

"""What each token id spells: the tokenizer file, read for turning ids into text.

A tokenizer's *decoder* says how the pieces of a vocabulary join into text. Two kinds cover the
models we serve. *Byte-level*: a piece is a run of bytes written in a 256-letter alphabet.
*Sentence-piece*: a piece is text with a sign for the space, beside 256 pieces `<0x00>` … `<0xFF>`
for what no other piece covers. A file with any other decoder is refused at start.

Encoding is the text process's business (`frontend.text`).
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from tokenizers import Tokenizer

from frontend.detokenizer import (
    BYTE_LEVEL_ALPHABET,
    ByteLevelDetokenizer,
    Detokenizer,
    SentencePieceDetokenizer,
    SilentDetokenizer,
)
from protocol.errors import ModelFileError

Piece = TypeVar("Piece")

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(Protocol):
    """The pieces of one tokenizer, as bytes and as text."""

    def detokenizer(self, *, skip_special_tokens: bool, after: bytes = b"") -> Detokenizer:
        """Return a fresh detokenizer for one sequence.

        `after`: an int32 column of the tokens that the sequence goes on from. Where they have text,
        the first token does not begin one, and so keeps its leading space.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one token stands for: part of a character, perhaps."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling, if there is such a token."""
        ...

    @property
    def num_text_ids(self) -> int:
        """One more than the largest id of a token that is no added one."""
        ...

    @property
    def longest_token_bytes(self) -> int:
        """At least the bytes of the longest token: what bounds the tokens of a text from below."""
        ...


class ByteLevelVocabulary:
    """Pieces are bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.longest_token_bytes = _longest_token(tokenizer)
        self.num_text_ids = _num_text_ids(tokenizer)
        self._tokenizer = tokenizer
        special = special_ids(tokenizer)
        pieces = Pieces[bytes](lambda token_id: _byte_level_piece(tokenizer, token_id))
        self._pieces = pieces
        self._shown = Pieces[bytes](lambda i: b"" if i in special else pieces[i])

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool,
        after: bytes = b"",  # noqa: ARG002
    ) -> Detokenizer:
        """Return a fresh detokenizer for one sequence; it is the same after any."""
        return ByteLevelDetokenizer(self._shown if skip_special_tokens else self._pieces)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one token stands for."""
        return self._pieces[token_id]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling."""
        return _token_id(self._tokenizer, token)


class SentencePieceVocabulary:
    """Pieces are text, or one byte."""

    def __init__(self, tokenizer: Tokenizer, rules: "JoinRules") -> None:
        self.longest_token_bytes = _longest_token(tokenizer)
        self.num_text_ids = _num_text_ids(tokenizer)
        self._tokenizer = tokenizer
        special = special_ids(tokenizer)
        pieces = Pieces[str | bytes](lambda i: _sentence_piece(tokenizer, i, rules))
        self._pieces = pieces
        self._shown = Pieces[str | bytes](lambda i: "" if i in special else pieces[i])
        self._rules = rules
        first = msgspec.structs.replace(rules, replacements=[(rules.dropped_from_first, "")])
        self._first = Pieces[str | bytes](lambda i: _sentence_piece(tokenizer, i, first))

    def detokenizer(self, *, skip_special_tokens: bool, after: bytes = b"") -> Detokenizer:
        """Return a fresh detokenizer for one sequence that goes on from `after`."""
        pieces = self._shown if skip_special_tokens else self._pieces
        # The last tokens are enough but for prompts of special tokens alone, which are short.
        if any(pieces[token_id] for token_id in reversed(memoryview(after).cast("i"))):
            return SentencePieceDetokenizer(pieces)
        return SentencePieceDetokenizer(
            pieces,
            strip=self._rules.strip,
            strip_count=self._rules.strip_count,
            first=self._first if self._rules.dropped_from_first else None,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one token stands for."""
        piece = self._pieces[token_id]
        return piece if isinstance(piece, bytes) else piece.encode()

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling."""
        return _token_id(self._tokenizer, token)


class WordlessVocabulary:
    """Of a model without a tokenizer: ids have no text."""

    longest_token_bytes = 0
    num_text_ids = 0

    def detokenizer(self, *, skip_special_tokens: bool, after: bytes = b"") -> Detokenizer:  # noqa: ARG002
        """Return a detokenizer that says nothing."""
        return SilentDetokenizer()

    def token_bytes(self, token_id: int) -> bytes:  # noqa: ARG002
        """Return no bytes."""
        return b""

    def token_id(self, token: str) -> int | None:  # noqa: ARG002
        """Return nothing."""
        return None


class Pieces(dict[int, Piece]):
    """The piece of each token id, spelled when first asked for."""

    def __init__(self, spell: Callable[[int], Piece]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token_id: int) -> Piece:
        piece = self[token_id] = self._spell(token_id)
        return piece


class JoinRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a sentence-piece decoder joins pieces."""

    replacements: Sequence[tuple[str, str]] = ()
    byte_pieces: bool = False
    strip: str = ""
    """Dropped from the start of the text, at most `strip_count` times."""
    strip_count: int = 0
    dropped_from_first: str = ""
    """What the first token shown loses, wherever in it, instead of having it replaced."""


class _Pattern(msgspec.Struct, frozen=True):
    text: str = msgspec.field(name="String")


class _Decoder(msgspec.Struct, frozen=True):
    """The fields we read of any decoder in a tokenizer.json."""

    type: str
    decoders: list["_Decoder"] = []
    pattern: _Pattern | None = None
    content: str = ""
    start: int = 0
    stop: int = 0
    replacement: str = "▁"
    prepend_scheme: str = "always"


class _TokenizerFile(msgspec.Struct, frozen=True):
    decoder: _Decoder | None = None


def load_vocabulary(path: Path) -> Vocabulary:
    """Read a tokenizer.json. Raises ModelFileError for one that cannot be read or joined."""
    try:
        decoder = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).decoder
        tokenizer = Tokenizer.from_file(str(path))
    # The library raises bare Exceptions for files that it does not understand.
    except Exception as error:
        raise ModelFileError(f"{path} is not a tokenizer file: {error}.") from error
    parts = [] if decoder is None else decoder.decoders or [decoder]
    if [part.type for part in parts] == ["ByteLevel"]:
        return ByteLevelVocabulary(tokenizer)
    rules = _join_rules(parts)
    if rules is None:
        kind = "no decoder" if decoder is None else f"a decoder of type {decoder.type}"
        raise ModelFileError(
            f"{path} has {kind}: this engine reads ByteLevel, or a Sequence of Replace, "
            f"ByteFallback, Fuse and Strip or of ByteFallback and Metaspace."
        )
    return SentencePieceVocabulary(tokenizer, rules)


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of the tokens that are signs to the model, not text."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _token_id(tokenizer: Tokenizer, token: str) -> int | None:
    token_id: int | None = tokenizer.token_to_id(token)
    return token_id


def _num_text_ids(tokenizer: Tokenizer) -> int:
    return 1 + max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)


def _longest_token(tokenizer: Tokenizer) -> int:
    return max((len(token.encode()) for token in tokenizer.get_vocab()), default=0)


def _join_rules(parts: Sequence[_Decoder]) -> JoinRules | None:
    """Return the rules of a sentence-piece decoder's parts, or None if they are not such."""
    if any(part.type == "Metaspace" for part in parts):
        return _metaspace_rules(parts)
    replacements: list[tuple[str, str]] = []
    rest = list(parts)
    while rest and rest[0].type == "Replace" and (pattern := rest[0].pattern):
        replacements.append((pattern.text, rest.pop(0).content))
    byte_pieces = bool(rest) and rest[0].type == "ByteFallback"
    if byte_pieces:
        rest.pop(0)
    if not rest or rest.pop(0).type != "Fuse":
        return None
    rules = JoinRules(replacements=replacements, byte_pieces=byte_pieces)
    if not rest:
        return rules
    strip = rest.pop(0)
    if rest or strip.type != "Strip" or strip.stop:
        return None
    return msgspec.structs.replace(rules, strip=strip.content, strip_count=strip.start)


def _metaspace_rules(parts: Sequence[_Decoder]) -> JoinRules | None:
    """Return the rules of a Metaspace decoder, alone or with others in its sequence."""
    kinds = [part.type for part in parts if part.type != "Fuse"]
    if sorted(kinds) not in (["Metaspace"], ["ByteFallback", "Metaspace"]):
        return None
    metaspace = next(part for part in parts if part.type == "Metaspace")
    return JoinRules(
        replacements=[(metaspace.replacement, " ")],
        byte_pieces="ByteFallback" in kinds,
        dropped_from_first=metaspace.replacement if metaspace.prepend_scheme != "never" else "",
    )


def _byte_level_piece(tokenizer: Tokenizer, token_id: int) -> bytes:
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    try:
        return bytes([BYTE_LEVEL_ALPHABET[letter] for letter in token])
    except KeyError:
        # An added token is written as itself, not in the alphabet.
        return token.encode()


def _sentence_piece(tokenizer: Tokenizer, token_id: int, rules: JoinRules) -> str | bytes:
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return ""
    for old, new in rules.replacements:
        token = token.replace(old, new)
    if rules.byte_pieces and (match := _BYTE_PIECE.fullmatch(token)):
        return bytes.fromhex(match.group(1))
    return token

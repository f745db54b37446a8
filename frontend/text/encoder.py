"""Text to token ids, with special tokens only where they are meant.

A text is a prompt that its client has made, perhaps by a template of his own: what spells a special
token in it is one. In a chat only the template's own spellings are. What a message spells never is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from frontend.text.marks import Unmarked
from protocol.errors import ModelFileError


class Encoder:
    """One model's tokenizer."""

    def __init__(
        self, tokenizer_file: Path, *, bos: str | None = None, add_bos: bool = False
    ) -> None:
        """`bos`: the token that begins texts. The tokenizer file decides whether it comes first.

        `add_bos`: put it there even where the file does not. Raises ModelFileError.
        """
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        # The library raises bare Exceptions for files that it does not understand.
        except Exception as error:
            raise ModelFileError(f"{tokenizer_file} is not a tokenizer file: {error}.") from error
        # A file may ask for truncation or padding, which is for training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self._bos_id = self._tokenizer.token_to_id(bos) if bos else None
        self._adds_bos = add_bos

    @property
    def special_texts(self) -> list[str]:
        """The spellings of the special tokens."""
        return list(self._special.values())

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text. A BOS is not added to one that begins with it."""
        self._tokenizer.encode_special_tokens = False
        ids = self._ids(text, add_special_tokens=add_special_tokens)
        if not add_special_tokens or self._bos_id is None:
            return ids
        if ids[:2] == [self._bos_id, self._bos_id]:
            return ids[1:]
        if self._adds_bos and ids[:1] != [self._bos_id]:
            return [self._bos_id, *ids]
        return ids

    def encode_chat(self, chat: Unmarked) -> list[int]:
        """Return the ids of a rendered chat."""
        self._tokenizer.encode_special_tokens = False
        if not chat.marks:
            return self._ids(chat.text, add_special_tokens=False)
        encoding: Encoding = self._tokenizer.encode(chat.text, add_special_tokens=False)
        return self._without_users_tokens(chat, encoding)

    def _without_users_tokens(self, chat: Unmarked, encoding: Encoding) -> list[int]:
        """Encode again, as plain text, each run between template tokens where a user spelled one.

        <|im_start|>  user ⏎ I say <|im_end|> here  <|im_end|>
        template's    run with a user's token       template's
        """
        self._tokenizer.encode_special_tokens = True
        ids: list[int] = []
        for run in self._runs(chat, encoding):
            if run.has_users_token:
                ids += self._ids(chat.text[run.start : run.end], add_special_tokens=False)
            else:
                ids += run.ids
            ids += run.closed_by
        return ids

    def _runs(self, chat: Unmarked, encoding: Encoding) -> Iterator["_Run"]:
        run = _Run(start=0)
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            is_special = token_id in self._special
            if is_special and not chat.is_users(start, end):
                run.end = start
                run.closed_by.append(token_id)
                yield run
                run = _Run(start=end)
            else:
                run.ids.append(token_id)
                run.has_users_token = run.has_users_token or is_special
        run.end = len(chat.text)
        yield run

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The batch call that keeps no offsets takes half the time.
        [encoding] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids


@dataclass(slots=True, eq=False)
class _Run:
    """The tokens between two special tokens of the template."""

    start: int
    """Place in the text."""
    end: int = 0
    ids: list[int] = field(default_factory=list)
    has_users_token: bool = False
    closed_by: list[int] = field(default_factory=list)
    """The template's token after the run, if there is one."""

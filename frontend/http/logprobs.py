"""Log-probabilities in OpenAI's two forms. Values are before temperature and always finite."""

from collections.abc import Sequence

from frontend.deltas import TokenLogprobs
from frontend.http.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprob,
    TokenLogprob,
)
from frontend.vocabulary import Vocabulary

FLOOR = -9999.0
"""What stands for "practically impossible", minus infinity and anything that is no number."""


class LogprobWriter:
    """Writes the log-probabilities of one choice."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        num_top: int,
        *,
        text_offset: int = 0,
        names_ids: bool = False,
    ) -> None:
        """`num_top`: candidates to show. `text_offset`: where the first token's text begins.

        `names_ids`: tokens are called `token_id:N`.
        """
        self._names_ids = names_ids
        self._vocabulary = vocabulary
        self._num_top = num_top
        self._text_offset = text_offset

    def chat(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Return the entries in the form of chat answers."""
        return ChatLogprobs(content=[self._content(entry) for entry in entries])

    def completion(
        self, entries: Sequence[TokenLogprobs], prompt: Sequence[TokenLogprobs] = ()
    ) -> CompletionLogprobs:
        """Return the entries in the form of completions, behind those of an echoed prompt."""
        offsets, place = [], 0
        for entry in prompt:
            # Tokens that the echo leaves out, such as a BOS, must not go beyond it.
            offsets.append(min(place, self._text_offset))
            place += len(self._text(entry.ids[0]))
        for entry in entries:
            offsets.append(self._text_offset)
            self._text_offset += len(self._text(entry.ids[0]))
        entries = [*prompt, *entries]
        tokens = [self._name(entry.ids[0]) for entry in entries]
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[
                _finite(entry.values[0]) if entry.values else None for entry in entries
            ],
            top_logprobs=[self._by_text(entry) if entry.values else None for entry in entries],
            text_offset=offsets,
        )

    def prompt(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, PromptLogprob] | None]:
        """Return the entries of a prompt's tokens, by token id."""
        return [self._by_id(entry) if entry.values else None for entry in entries]

    def _by_id(self, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        own = (entry.ids[0], entry.values[0])
        top = self._top(entry)
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(top, start=1)}
        ranks[own[0]] = entry.rank
        return {
            str(token_id): PromptLogprob(
                logprob=_finite(value), rank=ranks[token_id], decoded_token=self._text(token_id)
            )
            for token_id, value in dict.fromkeys([own, *top])
        }

    def _content(self, entry: TokenLogprobs) -> ContentLogprob:
        own = self._candidate(entry.ids[0], entry.values[0])
        return ContentLogprob(
            token=own.token,
            logprob=own.logprob,
            bytes=own.bytes,
            top_logprobs=[self._candidate(*pair) for pair in self._top(entry)],
        )

    def _candidate(self, token_id: int, value: float) -> TokenLogprob:
        spelled = self._vocabulary.token_bytes(token_id)
        return TokenLogprob(token=self._name(token_id), logprob=_finite(value), bytes=list(spelled))

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the candidates by their text, and by id where two have the same text."""
        own = (entry.ids[0], entry.values[0])
        by_text: dict[str, float] = {}
        for token_id, value in dict.fromkeys([own, *self._top(entry)]):
            text = self._name(token_id)
            by_text[_id_name(token_id) if text in by_text else text] = _finite(value)
        return by_text

    def _top(self, entry: TokenLogprobs) -> list[tuple[int, float]]:
        """Return the likeliest candidates; the token itself is one of them only if it is likely."""
        pairs = dict.fromkeys(zip(entry.ids, entry.values, strict=True))
        return sorted(pairs, key=lambda pair: -_finite(pair[1]))[: self._num_top]

    def _name(self, token_id: int) -> str:
        return _id_name(token_id) if self._names_ids else self._text(token_id)

    def _text(self, token_id: int) -> str:
        return self._vocabulary.token_bytes(token_id).decode(errors="replace")


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(value: float) -> float:
    # Also true for NaN, which compares false with everything.
    return value if value > FLOOR else FLOOR

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.detokenizer import (
    BYTE_LEVEL_ALPHABET,
    ByteLevelDetokenizer,
    SentencePieceDetokenizer,
    SilentDetokenizer,
)

TEXTS = [
    "The capital of France is Paris.",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈, then 🇫🇷",
    "日本語のテキストと中文，한국어도",
    "ภาษาไทยไม่มีช่องว่าง",
    "naïve café e\u0301 Ångström",
    "مرحبا بالعالم \u202eright to left",
    "tab\tnewline\n\r\nnul\x00 U+FFFD \ufffd U+FFFE \ufffe",
]


def split_randomly(ids, source):
    parts = []
    while ids:
        size = source.randint(1, 4)
        parts.append(ids[:size])
        ids = ids[size:]
    return parts


def stream(detokenizer, parts):
    deltas = [detokenizer.push(part) for part in parts]
    return [*deltas, detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_whole_and_in_valid_pieces(text, smol_tokenizer, smol_vocabulary):
    ids = smol_tokenizer.encode(text, add_special_tokens=False).ids
    deltas = stream(
        smol_vocabulary.detokenizer(skip_special_tokens=True), [[token_id] for token_id in ids]
    )
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=300, deadline=None)
@given(text=st.text(), seed=st.integers(0, 2**32))
def test_any_text_however_split_equals_its_decoding(text, seed, smol_tokenizer, smol_vocabulary):
    ids = smol_tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = smol_vocabulary.detokenizer(skip_special_tokens=True)
    deltas = stream(detokenizer, split_randomly(ids, random.Random(seed)))
    assert "".join(deltas) == smol_tokenizer.decode(ids)


@settings(max_examples=500, deadline=None)
@given(
    ids=st.lists(st.integers(0, 49151 + 50) | st.integers(0, 300), max_size=40),
    skip=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_ids_however_split_equal_their_decoding(
    ids, skip, seed, smol_tokenizer, smol_vocabulary
):
    """Ids at random are mostly no UTF-8; some are special, some name no token."""
    detokenizer = smol_vocabulary.detokenizer(skip_special_tokens=skip)
    deltas = stream(detokenizer, split_randomly(ids, random.Random(seed)))
    assert "".join(deltas) == smol_tokenizer.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_left_out_unless_asked_for(smol_vocabulary):
    ids = [28120, 2, 0, 1]
    shown = smol_vocabulary.detokenizer(skip_special_tokens=True).push(ids)
    everything = smol_vocabulary.detokenizer(skip_special_tokens=False).push(ids)
    assert (shown, everything) == ("hello", "hello<|im_end|><|endoftext|><|im_start|>")


def test_a_character_is_held_until_it_is_whole():
    pieces = {0: b"a\xf0\x9f", 1: b"\x98", 2: b"\x80b", 3: b"\xe2\x82"}
    detokenizer = ByteLevelDetokenizer(pieces)
    assert [detokenizer.push([i]) for i in (0, 1, 2, 3)] == ["a", "", "😀b", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_bytes_that_fit_nowhere_become_replacement_characters_at_once():
    detokenizer = ByteLevelDetokenizer({0: b"\xff", 1: b"\xe2\x82", 2: b"x"})
    assert [detokenizer.push([i]) for i in (0, 1, 2)] == ["\ufffd", "", "\ufffdx"]


def test_a_call_costs_what_its_new_tokens_cost():
    detokenizer = ByteLevelDetokenizer({7: b"word "})

    def time_calls(count):
        started = time.perf_counter()
        for _ in range(count):
            detokenizer.push([7])
        return time.perf_counter() - started

    early = min(time_calls(200) for _ in range(5))
    time_calls(50_000)
    late = min(time_calls(200) for _ in range(5))
    assert late < 5 * early


def test_the_alphabet_covers_every_byte_once():
    assert sorted(BYTE_LEVEL_ALPHABET.values()) == list(range(256))
    assert BYTE_LEVEL_ALPHABET["Ġ"] == 0x20
    assert BYTE_LEVEL_ALPHABET["A"] == 0x41


def test_a_run_of_byte_pieces_waits_for_its_end():
    pieces = {0: "x", 1: b"\xe4", 2: b"\xbd", 3: b"\xa0", 4: b"\xff", 5: ""}
    detokenizer = SentencePieceDetokenizer(pieces)
    assert [detokenizer.push([i]) for i in (0, 1, 2, 5, 3)] == ["x", "", "", "", ""]
    assert detokenizer.push([0]) == "你x"
    assert detokenizer.push([1, 2, 3, 4, 0]) == "\ufffd" * 4 + "x"
    assert detokenizer.push([1]) == ""
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize(
    ("tokens", "text"), [([0, 0, 1], "  x"), ([1, 0], "x "), ([2, 0, 1], " x"), ([], "")]
)
def test_spaces_are_stripped_from_the_start_only(tokens, text):
    detokenizer = SentencePieceDetokenizer({0: " ", 1: "x", 2: ""}, strip=" ", strip_count=1)
    deltas = stream(detokenizer, [[token] for token in tokens])
    assert "".join(deltas) == (text[1:] if text.startswith(" ") else text)


def test_a_model_without_words_says_nothing():
    detokenizer = SilentDetokenizer()
    assert detokenizer.push([1, 2]) + detokenizer.flush() == ""

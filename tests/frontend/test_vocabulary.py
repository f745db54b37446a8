import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from frontend.vocabulary import WordlessVocabulary, load_vocabulary
from protocol.errors import ModelFileError

PIECES = ["▁the", "▁", "a", "b▁c", "é", "你", "▁▁", "x", "<0x4G>", "ab"]


def sentence_piece_file(path, *, strip):
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {piece: 256 + place for place, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * strip)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("▁user x", special=False)])
    tokenizer.save(str(path))
    return tokenizer


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "strip"])
def sentence_piece(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("sp") / "tokenizer.json"
    return sentence_piece_file(path, strip=request.param), load_vocabulary(path)


@settings(max_examples=500, deadline=None)
@given(
    ids=st.lists(st.integers(0, 275) | st.integers(250, 275) | st.just(0xE4), max_size=20),
    skip=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_sentence_pieces_equal_the_librarys_decoding(sentence_piece, ids, skip, seed):
    tokenizer, vocabulary = sentence_piece
    detokenizer = vocabulary.detokenizer(skip_special_tokens=skip)
    source = random.Random(seed)
    text, rest = "", ids
    while rest:
        size = source.randint(1, 3)
        text += detokenizer.push(rest[:size])
        rest = rest[size:]
    assert text + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


def test_token_bytes_of_both_kinds(sentence_piece, smol_vocabulary):
    _, pieces = sentence_piece
    assert pieces.token_bytes(0xE4) == b"\xe4"
    assert pieces.token_bytes(256) == b" the"
    assert pieces.token_bytes(10_000) == b""
    assert smol_vocabulary.token_bytes(28120) == b"hello"
    assert smol_vocabulary.token_bytes(2) == b"<|im_end|>"
    assert smol_vocabulary.token_bytes(10**6) == b""


def test_added_tokens_are_written_as_themselves(tmp_path, smol_tokenizer):
    copy = Tokenizer.from_str(smol_tokenizer.to_str())
    copy.add_tokens([AddedToken("｜begin▁of x｜", special=False)])
    copy.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(tmp_path / "tokenizer.json")
    detokenizer = vocabulary.detokenizer(skip_special_tokens=True)
    ids = [copy.token_to_id("｜begin▁of x｜"), 28120]
    assert detokenizer.push(ids) == copy.decode(ids) == "｜begin▁of x｜hello"


def test_the_longest_token_bounds_what_a_text_can_need(smol_vocabulary):
    assert smol_vocabulary.longest_token_bytes >= len("<|im_start|>")
    assert WordlessVocabulary().longest_token_bytes == 0


def test_ids_of_special_tokens(smol_vocabulary):
    assert smol_vocabulary.token_id("<|im_end|>") == 2
    assert smol_vocabulary.token_id("no such token") is None
    assert WordlessVocabulary().token_id("<|im_end|>") is None


@pytest.mark.parametrize(
    ("decoder", "sentence"),
    [
        (None, "has no decoder"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "a decoder of type WordPiece"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Fuse"}]}, "type Sequence"),
    ],
)
def test_a_decoder_that_is_not_understood_is_refused(tmp_path, decoder, sentence):
    path = tmp_path / "tokenizer.json"
    sentence_piece_file(path, strip=False)
    content = json.loads(path.read_text())
    content["decoder"] = decoder
    path.write_text(json.dumps(content))
    with pytest.raises(ModelFileError, match=sentence):
        load_vocabulary(path)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe", b"[1]"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is not a tokenizer file"):
        load_vocabulary(path)


def test_a_model_without_a_tokenizer_has_no_words():
    vocabulary = WordlessVocabulary()
    assert vocabulary.detokenizer(skip_special_tokens=True).push([1, 2]) == ""
    assert vocabulary.token_bytes(5) == b""

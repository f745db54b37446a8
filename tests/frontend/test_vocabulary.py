import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from frontend.vocabulary import WordlessVocabulary, load_vocabulary
from protocol.columns import pack_int32
from protocol.errors import ModelFileError
from tests.frontend import tiny_tokenizers

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


def vocabulary_of(tokenizer, directory):
    tokenizer.save(str(directory / "tokenizer.json"))
    return load_vocabulary(directory / "tokenizer.json")


METASPACE = {
    "alone": decoders.Metaspace(),
    "first": decoders.Metaspace(prepend_scheme="first"),
    "never": decoders.Metaspace(prepend_scheme="never"),
    "after bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "before bytes": decoders.Sequence(
        [decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]
    ),
}


@pytest.fixture(scope="module", params=METASPACE)
def metaspace(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("metaspace")
    tokenizer = sentence_piece_file(directory / "tokenizer.json", strip=False)
    tokenizer.decoder = METASPACE[request.param]
    return tokenizer, vocabulary_of(tokenizer, directory)


@settings(max_examples=200, deadline=None)
@given(
    # No bytes of the sign for the space itself, which the library takes for one in one order.
    ids=st.lists(st.integers(256, 275) | st.sampled_from([0x41, 0xE4, 0xBD, 0xA0]), max_size=9),
    skip=st.booleans(),
)
def test_metaspace_equals_the_librarys_decoding(metaspace, ids, skip):
    tokenizer, vocabulary = metaspace
    has_bytes = "ByteFallback" in str(tokenizer.decoder)
    ids = [token_id for token_id in ids if has_bytes or token_id > 255]
    detokenizer = vocabulary.detokenizer(skip_special_tokens=skip)
    text = "".join(detokenizer.push([token_id]) for token_id in ids)
    assert text + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace_bpe", "unigram"])
@pytest.mark.parametrize("cut", [1, 2, 4, 6])
def test_an_output_goes_on_from_its_prompt(tmp_path, kind, cut):
    """Prompt and output, one behind the other, are the text of all tokens."""
    tokenizer = getattr(tiny_tokenizers, kind)()
    vocabulary = vocabulary_of(tokenizer, tmp_path)
    ids = tokenizer.encode("the capital of France is Paris").ids
    prompt, output = ids[:cut], ids[cut:]
    detokenizer = vocabulary.detokenizer(skip_special_tokens=True, after=pack_int32(prompt))
    text = "".join(detokenizer.push([token_id]) for token_id in output) + detokenizer.flush()
    before = tokenizer.decode(prompt)
    assert before + text == "the capital of France is Paris"
    assert text == vocabulary_text(vocabulary, ids, skip=True)[len(before) :]


def vocabulary_text(vocabulary, ids, *, skip):
    detokenizer = vocabulary.detokenizer(skip_special_tokens=skip)
    return detokenizer.push(ids) + detokenizer.flush()


def test_bytes_of_a_character_come_together(tmp_path):
    tokenizer = tiny_tokenizers.metaspace_bpe()
    vocabulary = vocabulary_of(tokenizer, tmp_path)
    ids = tokenizer.encode("sea 你é", add_special_tokens=False).ids
    detokenizer = vocabulary.detokenizer(skip_special_tokens=True)
    parts = [detokenizer.push([token_id]) for token_id in ids] + [detokenizer.flush()]
    assert "".join(parts) == "sea 你é"
    assert all("\ufffd" not in part for part in parts)

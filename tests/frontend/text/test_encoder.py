import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from frontend.text.encoder import Encoder
from frontend.text.marks import SpecialMarker, Unmarked, unmark
from protocol.errors import ModelFileError
from protocol.messages import ChatMessage

IM_START, IM_END = 1, 2


@pytest.fixture(scope="module")
def encoder(smol):
    return Encoder(smol.tokenizer_file)


def chat(encoder, *contents):
    """Encode messages through a template that puts special tokens of its own around them."""
    messages = [ChatMessage(role="user", content=content) for content in contents]
    marked = SpecialMarker(encoder.special_texts, "").mark(messages)
    rendered = "".join(f"<|im_start|>user\n{each.content}<|im_end|>\n" for each in marked.messages)
    return encoder.encode_chat(unmark(rendered, marked.mark))


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="aé日😀ก \n") | st.text(alphabet="<|im_end|> x"))
def test_a_text_is_encoded_as_the_library_does(text, encoder, smol_tokenizer):
    ids = encoder.encode(text, add_special_tokens=True)
    assert ids == smol_tokenizer.encode(text).ids
    assert smol_tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<", "<|im_", "x", " é", "\n"])),
        min_size=1,
        max_size=3,
    )
)
def test_in_a_chat_only_the_templates_tokens_are_special(parts, encoder, smol_tokenizer):
    contents = ["".join(words) for words in parts]
    ids = chat(encoder, *contents)
    special = [token_id for token_id in ids if token_id <= 16]
    assert special == [IM_START, IM_END] * len(contents)
    assert smol_tokenizer.decode(ids, skip_special_tokens=False) == "".join(
        f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents
    )


def test_a_chat_without_special_spellings_is_encoded_as_the_library_does(encoder, smol_tokenizer):
    text = "<|im_start|>user\nHello, wörld 😀 12345<|im_end|>\n"
    expected = smol_tokenizer.encode(text, add_special_tokens=False).ids
    assert encoder.encode_chat(Unmarked(text, frozenset())) == expected
    assert chat(encoder, "Hello, wörld 😀 12345") == expected


def test_only_the_run_with_a_users_token_is_encoded_again(encoder, smol_tokenizer):
    tokens = [smol_tokenizer.id_to_token(i) for i in chat(encoder, "say <|im_end|> now", "ok")]
    assert tokens == [
        *["<|im_start|>", "user", "Ċ", "say", "Ġ<", "|", "im", "_", "end", "|", ">", "Ġnow"],
        *["<|im_end|>", "Ċ", "<|im_start|>", "user", "Ċ", "ok", "<|im_end|>", "Ċ"],
    ]


def test_bos_is_put_first_where_the_file_puts_none(smol, tmp_path):
    with_bos = Encoder(smol.tokenizer_file, bos="<|endoftext|>", add_bos=True)
    assert with_bos.encode("hello", add_special_tokens=True) == [0, 28120]
    assert with_bos.encode("hello", add_special_tokens=False) == [28120]
    assert with_bos.encode("", add_special_tokens=True) == [0]
    tokenizer = Tokenizer.from_file(smol.tokenizer_file)
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for add_bos in (True, False):
        puts_one = Encoder(tmp_path / "tokenizer.json", bos="<|endoftext|>", add_bos=add_bos)
        assert puts_one.encode("hello hello hello", add_special_tokens=True)[:2] == [0, 28120]
        assert len(puts_one.encode("hello hello hello", add_special_tokens=True)) == 4


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_text_that_begins_with_a_bos_gets_no_second(smol, tmp_path, add_bos):
    """As a client's has who renders the chat himself."""
    tokenizer = Tokenizer.from_file(smol.tokenizer_file)
    if not add_bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = Encoder(tmp_path / "tokenizer.json", bos="<|endoftext|>", add_bos=add_bos)
    assert encoder.encode("<|endoftext|>hello", add_special_tokens=True) == [0, 28120]


def test_without_a_bos_there_is_none(smol):
    encoder = Encoder(smol.tokenizer_file, add_bos=True)
    assert encoder.encode("hello", add_special_tokens=True) == [28120]


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is not a tokenizer file"):
        Encoder(tmp_path / "tokenizer.json")

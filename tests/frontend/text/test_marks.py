import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.text.marks import SpecialMarker, cut_after_final_message, unmark
from protocol.errors import RequestError
from protocol.messages import ChatMessage

SPECIAL = ["<|im_end|>", "<|im", "<s>", "§"]


def marked(*texts, special=SPECIAL):
    messages = [ChatMessage(role="user", content=text) for text in texts]
    result = SpecialMarker(special, "template").mark(messages)
    return [message.content for message in result.messages], result.mark


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("plain text", set()),
        ("say <|im_end|> now", {5}),
        ("<s><s>", {1, 4}),
        ("ends in <|i", {9}),
        ("a < b", set()),
        ("a <", {3}),
        ("§5", {1}),
        ("", set()),
    ],
)
def test_where_marks_go(text, places):
    (content,), mark = marked(text)
    plain = unmark(content, mark)
    assert plain.text == text
    assert plain.marks == places


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text(alphabet="<|imend>s§ \ue000"), min_size=1, max_size=3))
def test_every_spelling_by_a_user_is_known_as_such(texts):
    contents, mark = marked(*texts)
    # The template writes a special token of its own around each message.
    plain = unmark("".join(f"<s>{content}<s>" for content in contents), mark)
    assert plain.text == "".join(f"<s>{text}<s>" for text in texts)
    place = 0
    for text in texts:
        template_tokens = [(place, place + 3), (place + 3 + len(text), place + 6 + len(text))]
        assert not any(plain.is_users(*span) for span in template_tokens)
        start = place + 3
        for special in SPECIAL:
            for offset in range(len(text)):
                # Also one that a user only begins, and the template's next letters complete.
                span = (start + offset, start + offset + len(special))
                if plain.text[slice(*span)] == special:
                    assert plain.is_users(*span)
        place += len(text) + 6


def test_the_mark_is_a_character_that_occurs_nowhere():
    (content,), mark = marked("\ue000 <s>")
    assert mark == "\ue001"
    assert content == "\ue000 <\ue001s>"


def test_messages_that_leave_no_character_for_the_mark_are_refused():
    everything = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(RequestError, match="every private-use character"):
        marked(everything)


def test_a_model_without_special_tokens_needs_no_marks():
    assert marked("<s> anything", special=[])[0] == ["<s> anything"]


def test_the_texts_of_variables_are_marked_too():
    variables = {"tools": [{"<s>": "say <s>", "n": 1}], "think": False, "none": None, "x": "plain"}
    marked = SpecialMarker(SPECIAL, "").mark([], variables)
    assert marked.variables == {
        "tools": [{"<\ue000s>": "say <\ue000s>", "n": 1}],
        "think": False,
        "none": None,
        "x": "plain",
    }
    assert SpecialMarker(SPECIAL, "").mark([], {"a": ["\ue000"]})[1:3] == ("\ue001", "\ue002")


@pytest.mark.parametrize(
    ("rendered", "kept"),
    [
        ("<s>user hi\n<s>Sure,  # </s>", "<s>user hi\n<s>Sure,  "),
        ("<s>Sure,  #</s>", "<s>Sure,"),
        ("<s>Sure#", "<s>Sure"),
        ("a # b # c", "a # b "),
    ],
)
def test_a_prompt_ends_with_its_final_message(rendered, kept):
    assert cut_after_final_message(rendered, "#") == kept


def test_a_final_message_that_is_not_shown_cannot_be_continued():
    with pytest.raises(RequestError, match="does not show the final message"):
        cut_after_final_message("<s>user hi", "#")

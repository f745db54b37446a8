"""docs/protocol.md is what the message types say."""

from pathlib import Path

from protocol import reference


def test_the_page_is_fresh():
    page = Path(__file__).parents[2] / "docs" / "protocol.md"
    assert page.read_text() == reference.render(), "run `make docs`"


def test_field_docs_are_read_from_the_source():
    source = 'class A:\n    x: int\n    """The\n    x."""\n    y: int\n    Z = 1\n    """Zed."""\n'
    assert reference.read_field_docs(source) == {("A", "x"): "The x.", ("A", "Z"): "Zed."}

"""What the bar shows, and that it can be silent."""

import pytest

from frontend.client.progress import ProgressBar
from frontend.client.results import Generation
from protocol.messages import Usage


@pytest.fixture
def generation():
    return Generation(
        index=0, prompt="x", samples=[], usage=Usage(prompt_tokens=30, completion_tokens=7)
    )


def test_it_shows_prompts_and_tokens_a_second_on_stderr(capsys, generation):
    with ProgressBar(2, is_shown=True) as bar:
        bar.count(generation)
        bar.count(generation)
    out, err = capsys.readouterr()
    last = err.rsplit("\r", 1)[1]
    assert out == ""
    assert last.startswith("prompts: 100%")
    assert "2/2" in last
    assert " prompts/s" in last
    assert "tok/s, out " in last


def test_it_shows_nothing_where_nothing_is_wanted(capsys, generation):
    with ProgressBar(2, is_shown=False) as bar:
        bar.count(generation)
    assert capsys.readouterr() == ("", "")

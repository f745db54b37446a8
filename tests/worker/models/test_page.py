"""docs/models.md is what the tested rows say."""

from pathlib import Path

from tests.worker.models import page


def test_the_page_is_up_to_date():
    file = Path(__file__).parents[3] / "docs" / "models.md"
    assert file.read_text() == page.render(), "run `make docs`"

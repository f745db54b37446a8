"""The documentation shows the examples as they are."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["offline", "client", "async_client"])
def test_the_client_page_shows_the_example(name):
    source = (ROOT / "examples" / f"{name}.py").read_text()
    assert f"```python\n{source}```" in (ROOT / "docs" / "client.md").read_text()

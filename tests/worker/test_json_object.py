from pathlib import Path

import pytest

from protocol.errors import ModelFileError
from worker.json_object import JsonObject

SOURCE = Path("config.json")


def test_null_is_as_missing():
    values = JsonObject(SOURCE, {"a": None})
    assert not values.has("a")
    assert values.integer("a", 3) == 3
    assert values.number("a", 0.5) == 0.5
    assert values.flag("a", default=True)
    assert values.text("a", "b") == "b"
    assert values.object("a") is None
    assert values.object_or_empty("a").is_empty()
    assert not values.is_empty()


def test_a_complaint_names_the_way_to_the_key():
    inner = JsonObject(SOURCE, {"outer": {"inner": {"key": "x"}}}).object_or_empty("outer")
    with pytest.raises(
        ModelFileError, match=r"^config\.json: outer\.inner\.key is 'x'; it must be"
    ):
        inner.object_or_empty("inner").number("key")


@pytest.mark.parametrize("value", [3, "1", [1.0, "2"], [True], [10**400], None])
def test_what_is_no_list_of_numbers(value: object):
    with pytest.raises(ModelFileError, match=r"config\.json: factors is .*number"):
        JsonObject(SOURCE, {"factors": value}).numbers("factors")


def test_numbers():
    assert JsonObject(SOURCE, {"factors": [1, 2.5]}).numbers("factors") == (1.0, 2.5)

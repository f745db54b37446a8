from pathlib import Path

import pytest

from protocol.user_cache import user_cache_dir


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"XDG_CACHE_HOME": "/var/x"}, Path("/var/x/tokenwire")),
        ({"XDG_CACHE_HOME": "relative"}, Path("~/.cache/tokenwire").expanduser()),
        ({}, Path("~/.cache/tokenwire").expanduser()),
    ],
)
def test_where_a_users_caches_are(environment: dict[str, str], directory: Path):
    assert user_cache_dir(environment) == directory

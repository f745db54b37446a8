"""Where this user's caches are: what took time to make, and can be made again."""

from collections.abc import Mapping
from pathlib import Path


def user_cache_dir(environment: Mapping[str, str]) -> Path:
    """Return the directory of Tokenwire's caches, by XDG's rules."""
    base = environment.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path("~/.cache").expanduser()
    return root / "tokenwire"

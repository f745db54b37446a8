"""Typed access to a GGUF header's metadata."""

from protocol.errors import ModelFileError
from worker.gguf_file import GgufHeader, MetadataValue


class GgufMetadata:
    """Typed access to a header's metadata; every complaint names file and key."""

    def __init__(self, header: GgufHeader) -> None:
        self._path = header.path
        self._values = header.metadata

    def bad(self, key: str, what: str) -> ModelFileError:
        """Return the complaint that a key's value is wrong; `what` begins with a verb."""
        value = repr(self._values.get(key))
        return ModelFileError(f"{self._path}: {key} is {value[:80]}; it {what}")

    def value(self, key: str, default: MetadataValue) -> MetadataValue:
        """Return whatever is there, or the default."""
        return self._values.get(key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer, or the default where there is none. Raises ModelFileError."""
        value = self.optional_integer(key)
        if value is None:
            value = default
        if value is None:
            raise self.bad(key, "must be an integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Return an integer or None. Raises ModelFileError."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(key, "must be an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number, or the default where there is none. Raises ModelFileError."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(key, "must be a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string, or the default where there is none. Raises ModelFileError."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, "must be a string")
        return value

    def token_id(self, key: str) -> tuple[int, ...]:
        """Return a token id, or nothing where there is none. Raises ModelFileError."""
        value = self.optional_integer(key)
        return () if value is None else (value,)

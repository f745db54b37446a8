"""One JSON object of a model's files, with typed access whose complaints name file and key."""

import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from protocol.errors import ModelFileError

MAX_CONFIG_BYTES = 4 << 20

Json: TypeAlias = dict[str, Any]


def read_json(path: Path) -> Json:
    """Read a JSON file that must hold one object. Raises ModelFileError."""
    try:
        if not path.is_file():
            raise ModelFileError(f"{path} is missing or is not a regular file")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelFileError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        value = json.loads(
            path.read_bytes(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} must hold a JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> Json:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {max(names, key=names.count)!r} appears twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class JsonObject:
    """Typed access to one JSON object of a file; every complaint names file and key."""

    def __init__(self, source: Path, values: Json, *, prefix: str = "") -> None:
        self._source = source
        self._values = values
        self._prefix = prefix
        """The keys that lead to this object, each followed by a dot."""

    @property
    def source(self) -> Path:
        """The file."""
        return self._source

    def with_defaults(self, defaults: Json) -> "JsonObject":
        """Return the object with values for keys that it does not have."""
        return JsonObject(self._source, defaults | self._values, prefix=self._prefix)

    def with_some_of(self, other: "JsonObject", keys: Collection[str]) -> "JsonObject":
        """Return the object with another's values for those of the keys that the other has."""
        values = {key: other._values[key] for key in keys if key in other._values}
        return JsonObject(self._source, self._values | values, prefix=self._prefix)

    def require_one_of(self, key: str, allowed: Sequence[object]) -> None:
        """Raise ModelFileError unless the key is absent or has one of these values."""
        if key in self._values and self._values[key] not in allowed:
            values = [json.dumps(value) for value in allowed if value is not None]
            raise self.bad(key, f"must be left out{''.join(f' or {value}' for value in values)}")

    def bad(self, key: str, what: str) -> ModelFileError:
        """Return the complaint that a key's value is wrong; `what` begins with a verb."""
        value = repr(self._values.get(key))
        return ModelFileError(f"{self._source}: {self._prefix}{key} is {value[:80]}; it {what}")

    def has(self, key: str) -> bool:
        """Whether the key has a value; null is none."""
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer, or the default where there is none. Raises ModelFileError."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(key, "must be an integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Return an integer or None. Raises ModelFileError."""
        return self.integer(key) if self.has(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number, or the default where there is none. Raises ModelFileError."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(key, "must be a number")
        return self._finite(key, value)

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers. Raises ModelFileError."""
        values = self._values.get(key)
        if not isinstance(values, list) or any(
            isinstance(value, bool) or not isinstance(value, int) for value in values
        ):
            raise self.bad(key, "must be a list of integers")
        return tuple(values)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers. Raises ModelFileError."""
        values = self._values.get(key)
        if not isinstance(values, list) or not all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        ):
            raise self.bad(key, "must be a list of numbers")
        return tuple(self._finite(key, value) for value in values)

    def _finite(self, key: str, value: float) -> float:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.bad(key, "must be a finite number")
        return number

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return true or false, or the default where there is neither. Raises ModelFileError."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, "must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string, or the default where there is none. Raises ModelFileError."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.bad(key, "must be a string")
        return value

    def object(self, key: str) -> "JsonObject | None":
        """Return an object inside this one, or None. Raises ModelFileError."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.bad(key, "must be an object")
        return JsonObject(self._source, value, prefix=f"{self._prefix}{key}.")

    def object_or_empty(self, key: str) -> "JsonObject":
        """Return an object inside this one; one without values where there is none."""
        return self.object(key) or JsonObject(self._source, {}, prefix=f"{self._prefix}{key}.")

    def is_empty(self) -> bool:
        """Whether the object has no keys."""
        return not self._values

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return an id, a list of ids or null as a tuple."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
            raise self.bad(key, "must be a token id or a list of token ids")
        return tuple(ids)

    def strings(self, key: str) -> list[str]:
        """Return a list of strings. Raises ModelFileError."""
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.bad(key, "must be a list of strings")
        return value

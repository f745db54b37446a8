"""Columns: integer sequences as little-endian bytes, the hot fields of the wire.

A column costs its size and nothing else: 4,096 token ids as int32 bytes take half a microsecond
to pass through msgpack, as a list they take a hundred times that. Every column of a message is
checked for a whole number of items when the message is made, by the sender and by the receiver.
"""

import sys
from array import array
from collections.abc import Iterable

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("Tokenwire's wire format needs a little-endian machine.")


def pack_int32(values: Iterable[int]) -> bytes:
    """Pack integers into an int32 column. Raises OverflowError outside 32 bits."""
    return array("i", values).tobytes()


def unpack_int32(column: bytes) -> list[int]:
    """Return the integers of an int32 column."""
    return memoryview(column).cast("i").tolist()


def pack_int64(values: Iterable[int]) -> bytes:
    """Pack integers into an int64 column. Raises OverflowError outside 64 bits."""
    return array("q", values).tobytes()


def unpack_int64(column: bytes) -> list[int]:
    """Return the integers of an int64 column."""
    return memoryview(column).cast("q").tolist()


def pack_float32(values: Iterable[float]) -> bytes:
    """Pack numbers into a float32 column."""
    return array("f", values).tobytes()


def unpack_float32(column: bytes) -> list[float]:
    """Return the numbers of a float32 column."""
    return array("f", column).tolist()


def unpack_rows(column: bytes, width: int) -> list[tuple[int, ...]]:
    """Return an int32 column of fixed-width rows as tuples."""
    flat = unpack_int32(column)
    return list(zip(*(flat[i::width] for i in range(width)), strict=True))

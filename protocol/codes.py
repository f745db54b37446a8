"""Integers on the wire that people read as names."""

import enum


class Code(enum.IntEnum):
    """A number where messages, columns and comparisons have it; its name where it is printed."""

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)

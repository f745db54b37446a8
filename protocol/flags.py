"""Config dataclasses as command lines, both ways.

Each process has one frozen dataclass of settings; its fields are its flags. `parse_flags` reads a
command line into one, `to_flags` writes one as the command line that gives it back, which is how
the launcher starts its children and what `--print-commands` shows. A field that is itself a
dataclass contributes its own fields.

A field's metadata: `help` (required), `choices`, and `flag` where the flag is not the field's
name. `bool` fields are switches: `--name` turns on what is off by default, `--no-name` turns off
what is on. Where a field's default says nothing by itself (None, an empty string, -1), its `help`
has to say what it means, and `--help` shows no default beside it.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar, get_args, get_origin, get_type_hints


class DataclassInstance(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


Config = TypeVar("Config", bound=DataclassInstance)


class _Parser(argparse.ArgumentParser):
    """Ends with one sentence on stderr instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Once(argparse.Action):
    """Refuses a flag given twice: the second would silently win."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if self.dest in namespace.__dict__:
            parser.error(f"argument {option_string}: given twice")
        setattr(namespace, self.dest, values)


def parse_flags(
    config_type: type[Config], argv: Sequence[str], *, program: str, description: str | None = None
) -> Config:
    """Read a command line. Exits 2 with one sentence if it is not legal.

    `__post_init__` of the dataclass may raise ValueError or ConfigError for values that are out of
    range; the former's text becomes that sentence.
    """
    parser = _Parser(
        prog=program,
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for spec, hint in _leaves(config_type):
        _add_flag(parser, spec, hint)
    values = vars(parser.parse_args(argv))
    try:
        return _build(config_type, values)
    except ValueError as error:
        parser.error(str(error))


def to_flags(config: DataclassInstance) -> list[str]:
    """Return the command line that `parse_flags` reads as this config; defaults are left out."""
    flags: list[str] = []
    values = _flat(dataclasses.asdict(config))
    for spec, _ in _leaves(type(config)):
        value = values[spec.name]
        if value == spec.default or value is None:
            continue
        if isinstance(value, bool):
            flags.append(_flag_name(spec))
        else:
            flags += [_flag_name(spec), str(value)]
    return flags


def describe_config(config: DataclassInstance) -> str:
    """Return a config's fields as `name=value`, for the log."""
    return " ".join(f"{name}={value}" for name, value in _flat(dataclasses.asdict(config)).items())


def _flat(nested: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= _flat(value) if isinstance(value, dict) else {name: value}
    return flat


def _leaves(
    config_type: type[DataclassInstance],
) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(config_type)
    for spec in dataclasses.fields(config_type):
        hint = hints[spec.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _leaves(hint)
        else:
            yield spec, hint


def _flag_name(spec: dataclasses.Field[Any]) -> str:
    name: str = spec.metadata.get("flag", "--" + spec.name.replace("_", "-"))
    return name.replace("--", "--no-", 1) if spec.default is True else name


def _add_flag(parser: _Parser, spec: dataclasses.Field[Any], hint: Any) -> None:  # noqa: ANN401
    help_text: str = spec.metadata["help"]
    if hint is bool:
        parser.add_argument(
            _flag_name(spec),
            dest=spec.name,
            action="store_const",
            const=not spec.default,
            help=help_text,
        )
        return
    required = spec.default is dataclasses.MISSING
    parser.add_argument(
        _flag_name(spec),
        dest=spec.name,
        action=_Once,
        type=_scalar(hint),
        choices=spec.metadata.get("choices"),
        required=required,
        metavar=None if "choices" in spec.metadata else _scalar(hint).__name__.upper(),
        help=help_text + _shown_default(spec.default),
    )


def _shown_default(default: object) -> str:
    """Return what `--help` adds about a default: nothing where the help itself explains it."""
    if default is dataclasses.MISSING or default in (None, "", -1):
        return ""
    return f" (default: {default})"


def _scalar(hint: Any) -> type:  # noqa: ANN401
    """Return str, int or float for a hint such as `int | None`."""
    if get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    if hint not in (str, int, float):
        raise TypeError(f"a flag cannot be of type {hint}")
    scalar: type = hint
    return scalar


def _build(config_type: type[Config], values: dict[str, Any]) -> Config:
    hints = get_type_hints(config_type)
    arguments: dict[str, Any] = {}
    for spec in dataclasses.fields(config_type):
        hint = hints[spec.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            arguments[spec.name] = _build(hint, values)
        elif spec.name in values:
            arguments[spec.name] = values[spec.name]
    return config_type(**arguments)

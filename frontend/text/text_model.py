"""What text work needs to know of a model, and where a model directory keeps it.

    tokenizer.json                       the tokenizer, as the `tokenizers` library reads it
    tokenizer_config.json                special tokens by name; in older models the chat template
    chat_template.jinja                  the chat template
    generation_config.json, config.json  the ids that end an answer; the first also how to sample

A GGUF file, or a directory without tokenizer.json, needs a conversion first
(`frontend.text.build`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from frontend.text.generation_config import GenerationConfig, read_generation_config
from protocol.errors import ModelFileError

UNCONVERTED_FILES = ("tokenizer.model", "vocab.json", "tekken.json", "spiece.model")
"""Tokenizer files that transformers can read and the `tokenizers` library cannot."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")

T = TypeVar("T")


class TextModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model's text facts."""

    tokenizer_file: str | None = None
    """Absolute path of a tokenizer.json. None: the model works on token ids only."""
    chat_template: str | None = None
    special_tokens: dict[str, str] = {}
    """Names by which a template knows special tokens ("bos_token", …), and their text."""
    eos_ids: list[int] = []
    """Tokens that end an answer."""
    add_bos: bool = False
    """Put bos_token before a text even where the tokenizer file does not say so."""
    generation: GenerationConfig = GenerationConfig()
    """What it says of sampling."""


class _TokenText(msgspec.Struct, frozen=True):
    content: str


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[_NamedTemplate] | None = None
    add_bos_token: bool | None = None


class _EosConfig(msgspec.Struct, frozen=True):
    eos_token_id: int | list[int] | None = None
    text_config: "_EosConfig | None" = None


def read_directory(directory: Path) -> TextModel:
    """Return the text facts of a model directory; `tokenizer_file` only if it needs no conversion.

    Raises ModelFileError for a file that is not what its name says.
    """
    config = _read(directory / "tokenizer_config.json", _TokenizerConfig)
    tokenizer_file = directory / "tokenizer.json"
    return TextModel(
        tokenizer_file=str(tokenizer_file.absolute()) if tokenizer_file.is_file() else None,
        chat_template=_chat_template(directory, config),
        special_tokens=dict(_special_tokens(directory)),
        eos_ids=list(dict.fromkeys(_eos_ids(directory))),
        add_bos=bool(config.add_bos_token),
        generation=read_generation_config(directory),
    )


def needs_conversion(model: Path) -> bool:
    """Return whether a model has a tokenizer, in a form that must be converted first."""
    if model.is_file():
        return True
    if (model / "tokenizer.json").is_file():
        return False
    return any((model / name).is_file() for name in UNCONVERTED_FILES)


def files_of_conversion(model: Path) -> list[Path]:
    """Return the files that decide what a conversion gives."""
    if model.is_file():
        return [model]
    names = (
        *UNCONVERTED_FILES,
        "merges.txt",
        "added_tokens.json",
        "special_tokens_map.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "config.json",
    )
    return [model / name for name in names if (model / name).is_file()]


def _chat_template(directory: Path, config: _TokenizerConfig) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{file} cannot be read: {error}.") from error
    if isinstance(config.chat_template, list):
        return {entry.name: entry.template for entry in config.chat_template}.get("default")
    return config.chat_template


def _special_tokens(directory: Path) -> Iterator[tuple[str, str]]:
    file = directory / "tokenizer_config.json"
    config = _read(file, dict[str, msgspec.Raw])
    for name in _SPECIAL_NAMES:
        if name in config:
            try:
                value = msgspec.json.decode(config[name], type=str | _TokenText | None)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ModelFileError(
                    f"{file}: {name} must be a token's text, an object with its `content`, or null."
                ) from error
            if value is not None:
                yield name, value if isinstance(value, str) else value.content


def _eos_ids(directory: Path) -> Iterator[int]:
    """Yield the ids that either file names: some models list one of theirs in one file only."""
    for name in ("generation_config.json", "config.json"):
        config = _read(directory / name, _EosConfig)
        for part in (config, config.text_config or config):
            eos = part.eos_token_id
            yield from [eos] if isinstance(eos, int) else eos or []


def _read(path: Path, kind: type[T]) -> T:
    """Decode a JSON file; a missing file reads as an empty object."""
    try:
        return msgspec.json.decode(path.read_bytes() if path.is_file() else b"{}", type=kind)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}.") from error

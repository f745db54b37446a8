"""What text work needs to know of a model, and where a model directory keeps it.

    tokenizer.json                       the tokenizer, as the `tokenizers` library reads it
    tokenizer_config.json                special tokens by name; in older models the chat template
    chat_template.jinja                  the chat template; in some models chat_template.json
    additional_chat_templates/*.jinja    further ones, by their names
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

DEFAULT_TEMPLATE = "default"
MAX_TEMPLATE_BYTES = 4 << 20

T = TypeVar("T")


class TextModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model's text facts."""

    tokenizer_file: str | None = None
    """Absolute path of a tokenizer.json. None: the model works on token ids only."""
    chat_templates: dict[str, str] = {}
    """Their sources by name; `default` is what a chat without tools is rendered by."""
    chat_template_file: str | None = None
    """The operator's file that they come from, instead of the model's."""
    special_tokens: dict[str, str] = {}
    """Names by which a template knows special tokens ("bos_token", …), and their text."""
    eos_ids: list[int] = []
    """Tokens that end an answer."""
    add_bos: bool = False
    """Put bos_token before a text even where the tokenizer file does not say so."""
    generation: GenerationConfig = GenerationConfig()
    """What it says of sampling."""

    @property
    def chat_template(self) -> str | None:
        """The template of a chat without tools."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)


class _TokenText(msgspec.Struct, frozen=True):
    content: str


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[_NamedTemplate] | None = None
    add_bos_token: bool | None = None


class _TemplateFile(msgspec.Struct, frozen=True):
    chat_template: str | list[_NamedTemplate] | None = None


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
        chat_templates=_chat_templates(directory, config),
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
        "chat_template.json",
        "generation_config.json",
        "config.json",
    )
    return [model / name for name in names if (model / name).is_file()]


def with_template_file(model: TextModel, file: Path) -> TextModel:
    """Return a model's text facts with a template file instead of its own templates.

    Raises ModelFileError for a file that cannot be read.
    """
    return msgspec.structs.replace(
        model,
        chat_templates={DEFAULT_TEMPLATE: read_template(file)},
        chat_template_file=str(file),
    )


def read_template(file: Path) -> str:
    """Return a template's source. Raises ModelFileError."""
    try:
        size = file.stat().st_size
        if size > MAX_TEMPLATE_BYTES:
            raise ModelFileError(
                f"{file} has {size} bytes; a chat template has at most {MAX_TEMPLATE_BYTES}."
            )
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{file} cannot be read: {error}.") from error


def _chat_templates(directory: Path, config: _TokenizerConfig) -> dict[str, str]:
    """Return a directory's templates by name. A newer kind of file comes before an older one."""
    templates = _by_name(config.chat_template)
    templates |= _by_name(_read(directory / "chat_template.json", _TemplateFile).chat_template)
    if (directory / "chat_template.jinja").is_file():
        templates[DEFAULT_TEMPLATE] = read_template(directory / "chat_template.jinja")
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = read_template(file)
    return templates


def _by_name(templates: str | list[_NamedTemplate] | None) -> dict[str, str]:
    if isinstance(templates, str):
        return {DEFAULT_TEMPLATE: templates}
    return {entry.name: entry.template for entry in templates or []}


def _special_tokens(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield special tokens by name; the older file counts only where the newer one is silent."""
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = directory / name
        config = _read(file, dict[str, msgspec.Raw])
        for token in _SPECIAL_NAMES:
            value = _token_text(file, token, config[token]) if token in config else None
            if value is not None:
                yield token, value


def _token_text(file: Path, name: str, raw: msgspec.Raw) -> str | None:
    try:
        value = msgspec.json.decode(raw, type=str | _TokenText | None)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelFileError(
            f"{file}: {name} must be a token's text, an object with its `content`, or null."
        ) from error
    return value.content if isinstance(value, _TokenText) else value


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

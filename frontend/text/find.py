"""Where a model's text facts come from: its directory, or an earlier conversion in a cache.

The text process converts what is not there yet; the frontend looks it up the same way afterwards.
"""

from collections.abc import Sequence
from pathlib import Path

from frontend.text.cache import TokenizerCache, cache_key
from frontend.text.text_model import (
    TextModel,
    files_of_conversion,
    needs_conversion,
    read_directory,
    with_template_file,
)
from protocol.errors import ConfigError


def find_text_model(
    model: Path, caches: Sequence[TokenizerCache], chat_template: str = ""
) -> TextModel | None:
    """Return a model's text facts, or None if its tokenizer must be converted first.

    `chat_template`: a file that comes instead of the model's templates; empty: none. Raises
    ConfigError if there is no such model, ModelFileError for files that cannot be read.
    """
    if not model.exists():
        raise ConfigError(f"--model: there is no file or directory {model}.")
    found = _facts(model, caches)
    if found is None or not chat_template:
        return found
    return with_template_file(found, Path(chat_template))


def _facts(model: Path, caches: Sequence[TokenizerCache]) -> TextModel | None:
    if not needs_conversion(model):
        return read_directory(model)
    key = conversion_key(model)
    return next((found for cache in caches if (found := cache.load(key))), None)


def conversion_key(model: Path) -> str:
    """Return the key under which a model's conversion is cached."""
    return cache_key(files_of_conversion(model))

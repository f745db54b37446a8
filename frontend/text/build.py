"""Tokenizers converted to tokenizer.json, by transformers.

Imported only when a conversion is needed: transformers takes seconds to import and to convert. What
a GGUF file says of its special tokens is read from its own metadata.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import gguf
import msgspec
import tokenizers.decoders
import transformers

from frontend.text.cache import Conversion
from frontend.text.text_model import DEFAULT_TEMPLATE, TextModel, read_directory
from protocol.errors import ModelFileError

_GGUF_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_GGUF_EOS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


def convert(model: Path) -> Conversion:
    """Convert a GGUF file's or a model directory's tokenizer.

    Raises ModelFileError for a tokenizer that cannot be converted.
    """
    if model.is_dir():
        facts = read_directory(model)
        return Conversion(_tokenizer_json(model, model, gguf_file=None), facts)
    fields = _gguf_fields(model)
    if "tokenizer.ggml.tokens" not in fields:
        return Conversion(b"", TextModel())
    facts = _gguf_facts(model, fields)
    tokenizer_json = _tokenizer_json(
        model,
        model.parent,
        gguf_file=model.name,
        is_byte_level=_value(model, fields, "tokenizer.ggml.model", str) == "gpt2",
    )
    num_tokens = len(_value(model, fields, "tokenizer.ggml.tokens", list[str]))
    return Conversion(_without_strangers(tokenizer_json, num_tokens), facts)


def _tokenizer_json(
    model: Path, directory: Path, *, gguf_file: str | None, is_byte_level: bool = False
) -> bytes:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(directory), gguf_file=gguf_file, local_files_only=True, trust_remote_code=False
        )
        backend = tokenizer.backend_tokenizer
        if is_byte_level:
            # Some releases give a Llama's file sentence-piece steps before this one; they change
            # nothing for such a vocabulary, but make a decoder that is neither kind.
            backend.decoder = tokenizers.decoders.ByteLevel()
        return str(backend.to_str()).encode()
    # Foreign code on a foreign file: whatever it raises, the file is what the operator can change.
    except Exception as error:
        raise ModelFileError(
            f"The tokenizer of {model} cannot be converted ({type(error).__name__}: {error}); "
            f"a directory with a tokenizer.json would do."
        ) from error


def _without_strangers(tokenizer_json: bytes, num_tokens: int) -> bytes:
    """Drop added tokens that the file has not: a class's defaults, with ids that no model knows."""
    tokenizer = msgspec.json.decode(tokenizer_json)
    tokenizer["added_tokens"] = [
        token for token in tokenizer["added_tokens"] if token["id"] < num_tokens
    ]
    return msgspec.json.encode(tokenizer)


def _gguf_fields(model: Path) -> Mapping[str, gguf.ReaderField]:
    try:
        fields: Mapping[str, gguf.ReaderField] = gguf.GGUFReader(str(model)).fields
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelFileError(f"{model} is not a readable GGUF file: {error}.") from error
    return fields


def _value(model: Path, fields: Mapping[str, gguf.ReaderField], name: str, kind: Any) -> Any:  # noqa: ANN401
    if name not in fields:
        return None
    try:
        return msgspec.convert(fields[name].contents(), kind)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{model}: {name} is not what it has to be: {error}.") from error


def _gguf_facts(model: Path, fields: Mapping[str, gguf.ReaderField]) -> TextModel:
    value = partial(_value, model, fields)
    tokens: list[str] = value("tokenizer.ggml.tokens", list[str])
    special = {name: value(field, _TokenId) for name, field in _GGUF_SPECIAL.items()}
    eos = [value(field, _TokenId) for field in _GGUF_EOS]
    return TextModel(
        chat_templates=_gguf_templates(value),
        special_tokens={
            name: tokens[token_id]
            for name, token_id in special.items()
            if token_id is not None and token_id < len(tokens)
        },
        eos_ids=list(dict.fromkeys(token_id for token_id in eos if token_id is not None)),
        add_bos=bool(value("tokenizer.ggml.add_bos_token", bool)),
    )


def _gguf_templates(value: Callable[[str, Any], Any]) -> dict[str, str]:
    names: list[str] = value("tokenizer.chat_templates", list[str]) or []
    sources = {name: value(f"tokenizer.chat_template.{name}", str) for name in names}
    sources[DEFAULT_TEMPLATE] = value("tokenizer.chat_template", str)
    return {name: source for name, source in sources.items() if source is not None}

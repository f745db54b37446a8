"""Tokenizers converted to tokenizer.json, by transformers.

Imported only when a conversion is needed: transformers takes seconds to import and to convert. What
a GGUF file says of its special tokens is read from its own metadata.
"""

from pathlib import Path
from typing import Any

import gguf
import msgspec
import transformers

from frontend.text.cache import Conversion
from frontend.text.text_model import TextModel, read_directory
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


def convert(model: Path) -> Conversion:
    """Convert a GGUF file's or a model directory's tokenizer.

    Raises ModelFileError for a tokenizer that cannot be converted.
    """
    if model.is_dir():
        facts = read_directory(model)
        return Conversion(_tokenizer_json(model, model, gguf_file=None), facts)
    gguf_facts = _gguf_facts(model)
    if gguf_facts is None:
        return Conversion(b"", TextModel())
    return Conversion(_tokenizer_json(model, model.parent, gguf_file=model.name), gguf_facts)


def _tokenizer_json(model: Path, directory: Path, *, gguf_file: str | None) -> bytes:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(directory), gguf_file=gguf_file, local_files_only=True, trust_remote_code=False
        )
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    # Foreign code on a foreign file: whatever it raises, the file is what the operator can change.
    except Exception as error:
        raise ModelFileError(
            f"The tokenizer of {model} cannot be converted ({type(error).__name__}: {error}); "
            f"a directory with a tokenizer.json would do."
        ) from error


def _gguf_facts(model: Path) -> TextModel | None:
    try:
        fields = gguf.GGUFReader(str(model)).fields
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelFileError(f"{model} is not a readable GGUF file: {error}.") from error

    def value(name: str, kind: Any) -> Any:  # noqa: ANN401
        return msgspec.convert(fields[name].contents(), kind) if name in fields else None

    if "tokenizer.ggml.tokens" not in fields:
        return None
    tokens: list[str] = value("tokenizer.ggml.tokens", list[str])
    special = {name: value(field, int) for name, field in _GGUF_SPECIAL.items()}
    eos = [value(field, int) for field in _GGUF_EOS]
    return TextModel(
        chat_template=value("tokenizer.chat_template", str),
        special_tokens={
            name: tokens[token_id]
            for name, token_id in special.items()
            if token_id is not None and token_id < len(tokens)
        },
        eos_ids=list(dict.fromkeys(token_id for token_id in eos if token_id is not None)),
        add_bos=bool(value("tokenizer.ggml.add_bos_token", bool)),
    )

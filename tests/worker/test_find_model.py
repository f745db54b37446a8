import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from protocol.errors import ConfigError
from worker.find_model import BUNDLED_FILE, BUNDLED_NAME, bundled_model, find_model


def test_without_a_name_it_is_the_bundled_model():
    path, name = find_model("")
    assert path == bundled_model()
    assert (Path(path).name, name) == (BUNDLED_FILE, BUNDLED_NAME)


def test_a_directory_is_served_by_its_name_and_a_file_by_its_stem(tmp_path):
    file = tmp_path / "tiny.Q4.gguf"
    file.touch()
    assert find_model(str(tmp_path)) == (str(tmp_path), tmp_path.name)
    assert find_model(str(file)) == (str(file), "tiny.Q4")


@pytest.mark.parametrize("name", ["no/such/model", "./absent", "~nobody-at-all/x", "x" * 5000])
def test_what_is_not_there_is_refused_without_asking_the_hub(name):
    with pytest.raises(ConfigError, match="--model"):
        find_model(name)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that gives a directory with a config, or raises; what it was asked for."""
    (tmp_path / "config.json").touch()
    asked = []

    def answer(repository, *file, revision=None, allow_patterns=(), ignore_patterns=()):
        asked.append((repository, *file, revision))
        if isinstance(hub.answer, Exception):
            raise hub.answer
        return hub.answer

    class hub:  # noqa: N801 - an object with two fields
        answer: object = str(tmp_path)

    hub.asked = asked
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", answer)
    return hub


@pytest.mark.parametrize(
    ("model", "asked", "name"),
    [
        ("owner/name", ("owner/name", None), "owner/name"),
        ("owner/name-1.5@v2", ("owner/name-1.5", "v2"), "owner/name-1.5"),
        ("owner/name@refs/pr/1", ("owner/name", "refs/pr/1"), "owner/name"),
        ("o/n-GGUF/n.Q4_K_M.gguf", ("o/n-GGUF", "n.Q4_K_M.gguf", None), "n.Q4_K_M"),
        ("o/n/q4/n.gguf@main", ("o/n", "q4/n.gguf", "main"), "n"),
    ],
)
def test_hub_ids(hub, model, asked, name):
    assert find_model(model) == (hub.answer, name)
    assert hub.asked == [asked]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.LocalEntryNotFoundError("no"), ["neither a local path nor whole in"]),
        (errors.RepositoryNotFoundError, ["nor a model on the Hub"]),
        (errors.GatedRepoError, ["accepted its terms", "hf auth login"]),
        (errors.RevisionNotFoundError, ["owner/name has no revision v9"]),
        (OSError(28, "No space left on device"), ["OSError", "No space left on device"]),
        (RuntimeError("two\nlines"), ["cannot be fetched", "RuntimeError"]),
    ],
    ids=str,
)
def test_what_the_hub_refuses_is_one_sentence(hub, error, words):
    hub.answer = error if isinstance(error, Exception) else error.__new__(error)
    with pytest.raises(ConfigError) as raised:
        find_model("owner/name@v9")
    for word in ["--model owner/name@v9", *words]:
        assert word in str(raised.value)


def test_a_repository_of_gguf_files_alone_wants_one_named(hub, tmp_path):
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"name one: owner/name/FILE\.gguf"):
        find_model("owner/name")


@pytest.mark.slow
def test_offline_the_cache_is_all_there_is(tmp_path):
    snapshot = tmp_path / "models--owner--there" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    script = "import sys; from worker.find_model import find_model; print(*find_model(sys.argv[1]))"

    def run(model):
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
        command = [sys.executable, "-c", script, model]
        root = Path(__file__).parents[2]
        return subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=60
        )

    assert run("owner/there").stdout.split() == [str(snapshot), "owner/there"]
    last = run("owner/absent").stderr.splitlines()[-1]
    assert last.endswith(
        f"--model owner/absent is neither a local path nor whole in {tmp_path}, and "
        "HF_HUB_OFFLINE forbids asking the Hub."
    )

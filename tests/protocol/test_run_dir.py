"""The run directory: private, locked, swept."""

import os
import stat
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.run_dir import ClaimedRunDir, RunDir


@pytest.fixture(autouse=True)
def _own_parent(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_a_new_directory_is_private_and_goes_with_its_run(tmp_path):
    with ClaimedRunDir(None) as claimed:
        path = Path(claimed.names.path)
        assert path.parent == tmp_path
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "rank-0").touch()
    assert not path.exists()


def test_a_named_directory_keeps_what_is_not_ours(tmp_path):
    path = tmp_path / "run"
    with ClaimedRunDir(str(path)) as claimed:
        claimed.names.run_file().touch()
        (path / "notes").touch()
    assert os.listdir(path) == ["notes"]


def test_a_second_claim_is_refused(tmp_path):
    path = tmp_path / "run"
    with ClaimedRunDir(str(path)), pytest.raises(ConfigError, match="still alive"):
        ClaimedRunDir(str(path))


def test_what_a_killed_launcher_left_is_swept(tmp_path):
    dead = tmp_path / "tokenwire-dead"
    dead.mkdir()
    RunDir(str(dead)).lock_file().touch()
    with ClaimedRunDir(None) as alive, ClaimedRunDir(None):
        assert not dead.exists()
        assert Path(alive.names.path).exists()


def test_a_directory_open_to_others_is_refused(tmp_path):
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        ClaimedRunDir(str(path))


def test_a_path_too_long_for_a_socket_is_refused_before_anything_is_made(tmp_path):
    path = tmp_path / ("x" * 120)
    with pytest.raises(ConfigError, match="allows 107; choose a shorter directory"):
        ClaimedRunDir(str(path))
    assert not path.exists()


@pytest.mark.parametrize("name", ["lock", "store", "rank-0"])
def test_a_directory_where_a_file_of_ours_belongs_is_refused(tmp_path, name):
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / name).mkdir()
    with pytest.raises(ConfigError, match=f"--run-dir .* cannot be used: .*/{name}: Is a dir"):
        ClaimedRunDir(str(tmp_path / "run"))


def test_a_directory_that_goes_during_the_run_is_no_matter(tmp_path):
    path = tmp_path / "run"
    with ClaimedRunDir(str(path)):
        (path / "lock").unlink()
        path.rmdir()
    assert not path.exists()

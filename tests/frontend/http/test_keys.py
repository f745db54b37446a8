import os

import pytest

from frontend.http.keys import read_keys
from protocol.errors import ConfigError


def test_keys_of_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst-key\n\n  second-key  \n")
    keys = read_keys(file)
    first, second = keys.domain_of(b"Bearer first-key"), keys.domain_of(b"Bearer second-key")
    assert None not in (first, second)
    assert first != second
    assert keys.domain_of(b"Bearer # ours") is None
    assert keys.domain_of(b"Bearer first-keyx") is None


@pytest.fixture(autouse=True)
def _files_are_private():
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.parametrize("mode", [0o644, 0o666, 0o604, 0o620])
def test_a_file_that_others_can_get_at_is_refused(tmp_path, mode):
    file = tmp_path / "keys"
    file.write_text("first-key\n")
    file.chmod(mode)
    with pytest.raises(
        ConfigError, match=rf"is open to other users \(mode {mode:04o}\): chmod 600"
    ):
        read_keys(file)
    file.chmod(0o640)
    assert read_keys(file).domain_of(b"Bearer first-key") is not None


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "holds no key"),
        (b"# only a comment\n", "holds no key"),
        (b"short\n", "shorter than 8"),
        (b"with a space\n", "has spaces"),
        ("schlüssel-eins\n".encode(), "beyond ASCII"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff", "cannot be read: it is not text"),
    ],
)
def test_a_file_without_usable_keys_is_refused(tmp_path, content, sentence):
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        read_keys(file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--api-key-file .*: No such file or directory"):
        read_keys(tmp_path / "nothing")

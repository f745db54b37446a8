"""Recordings are msgpack streams that the plain msgpack package reads."""

import stat

import msgpack
import msgspec
import pytest

from protocol.errors import ConfigError
from protocol.messages import Ping
from protocol.recording import Recorder, read_recording, recorder


def test_frames_come_back_as_they_went(tmp_path):
    frame = msgspec.msgpack.encode(Ping(epoch=1, seq=2))
    tap = recorder(str(tmp_path / "taps"), "scheduler")
    assert tap is not None
    tap.record("in", "ipc://a", b"f0", frame)
    tap.record("out", "ipc://b", b"", b"\xc1 no msgpack")
    path = tmp_path / "taps" / "scheduler.tap"
    with path.open("rb") as file:
        plain = list(msgpack.Unpacker(file))
    assert plain[0][1:] == ["in", "ipc://a", b"f0", ["Ping", 1, 2, 0, 0, 0, 0, 0, None]]
    assert plain[1][1:] == ["out", "ipc://b", b"", b"\xc1 no msgpack"]
    assert [entry.frame for entry in read_recording(path)] == [frame, b"\xc1 no msgpack"]
    tap.close()


def test_an_entry_cut_short_is_left_out(tmp_path):
    tap = recorder(str(tmp_path), "w")
    assert tap is not None
    for seq in (1, 2):
        tap.record("in", "a", b"", msgspec.msgpack.encode(Ping(seq=seq)))
    tap.close()
    path = tmp_path / "w.tap"
    path.write_bytes(path.read_bytes()[:-1])
    assert len(list(read_recording(path))) == 1


def test_a_second_recording_is_appended_for_this_user_alone(tmp_path):
    for seq in (1, 2):
        tap = recorder(str(tmp_path / "taps"), "w")
        assert tap is not None
        tap.record("in", "a", b"", msgspec.msgpack.encode(Ping(seq=seq)))
        tap.close()
    path = tmp_path / "taps" / "w.tap"
    assert [msgspec.msgpack.decode(entry.frame)[2] for entry in read_recording(path)] == [1, 2]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_no_directory_means_no_recorder():
    assert recorder("", "w") is None


def test_a_directory_that_cannot_be_made_is_named():
    with pytest.raises(ConfigError, match="--record /dev/null/tape cannot be written: Not a dir"):
        Recorder("/dev/null/tape", "scheduler")


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, caplog):
    (tmp_path / "scheduler.tap").symlink_to("/dev/full")
    recorder = Recorder(str(tmp_path), "scheduler")
    for _ in range(2):
        recorder.record("in", "address", b"", b"\x90")
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == f"recording ends file={tmp_path}/scheduler.tap: No space left on device"

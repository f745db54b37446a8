"""A launcher's life, told by stand-ins for launch.py."""

import os
import signal
import time

import pytest

from frontend.client import engine_process
from frontend.client.engine_process import EngineProcess
from frontend.client.errors import EngineTimeoutError
from protocol.errors import ConfigError, ProcessError

WAIT_FOR_LIFELINE = """
import os, sys
lifeline = int(sys.argv[sys.argv.index("--lifeline-fd") + 1])
print("ready http=http://127.0.0.1:1 client=ipc:///x seconds=0.1", flush=True)
os.read(lifeline, 1)
print("the end", file=sys.stderr)
"""
DEAF = """
import time
print("ready http=http://127.0.0.1:1 client=ipc:///x seconds=0.1", flush=True)
time.sleep(60)
"""


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Return a function that starts a script in the place of launch.py."""
    started = []

    def start(script):
        path = tmp_path / "launch.py"
        path.write_text(script)
        monkeypatch.setattr(engine_process, "LAUNCHER", path)
        started.append(EngineProcess(["--flag"]))
        return started[-1]

    yield start
    for process in started:
        process.close(0.0)


def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_ready_line_gives_the_address_and_closing_ends_it(launcher, capfd):
    process = launcher(WAIT_FOR_LIFELINE)
    process.wait_until_ready(10)
    assert process.client_address == "ipc:///x"
    assert not has_ended(process.pid)
    process.close(1.0)
    process.close(1.0)
    assert has_ended(process.pid)
    assert "the end" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "error"), [(2, ConfigError), (1, ProcessError)], ids=["usage", "failure"]
)
def test_a_start_that_fails_is_raised_in_the_launchers_words(launcher, code, error):
    process = launcher(
        "import sys; print('12:00 I launch starting', file=sys.stderr);"
        f"print('launch.py: --tp is 0.', file=sys.stderr); sys.exit({code})"
    )
    with pytest.raises(error, match=r"^--tp is 0\.$"):
        process.wait_until_ready(10)


def test_a_start_without_a_word_is_a_failure_too(launcher):
    process = launcher("import os; os._exit(3)")
    with pytest.raises(ProcessError, match="The launcher ended before the engine was ready"):
        process.wait_until_ready(10)


def test_a_start_that_takes_too_long_is_left(launcher, monkeypatch):
    monkeypatch.setattr(engine_process, "END_TIMEOUT_S", 0.2)
    process = launcher("import time; time.sleep(60)")
    started = time.monotonic()
    with pytest.raises(EngineTimeoutError, match=r"start_timeout_s, 0\.3 s"):
        process.wait_until_ready(0.3)
    assert time.monotonic() - started < 5


def test_a_launcher_that_does_not_end_is_killed(launcher, monkeypatch):
    monkeypatch.setattr(engine_process, "END_TIMEOUT_S", 0.2)
    process = launcher(DEAF)
    process.wait_until_ready(10)
    assert process.last_sentence() is None
    process.close(0.0)
    assert has_ended(process.pid)


def test_a_log_longer_than_a_pipe_stops_nobody(launcher, capfd):
    process = launcher(
        "import sys\n"
        "for i in range(5000): print('x' * 100, file=sys.stderr)\n"
        "print('launch.py: the run ends because worker-0 died', file=sys.stderr)\n"
    )
    with pytest.raises(ProcessError, match="the run ends because worker-0 died"):
        process.wait_until_ready(10)
    assert len(capfd.readouterr().err) > 500_000


def test_an_interrupt_of_the_terminal_does_not_reach_it(launcher):
    process = launcher(WAIT_FOR_LIFELINE)
    process.wait_until_ready(10)
    assert os.getpgid(process.pid) != os.getpgid(0)
    os.kill(process.pid, signal.SIGTERM)

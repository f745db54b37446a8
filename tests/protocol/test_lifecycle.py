"""Children as real processes: what they report, and that they end with their launcher."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from protocol.child import Child
from protocol.messages import Failure, Ready

ROOT = str(Path(__file__).parents[2])

CHILD = """
import sys, time
from dataclasses import dataclass
from protocol.channels import Inbox
from protocol.errors import ConfigError, ProcessError
from protocol.flags import parse_flags
from protocol.lifecycle import ProcessConfig, run_process

@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    process: ProcessConfig

config = parse_flags(Config, sys.argv[1:], program="child")

def run(lifeline):
    BODY
    lifeline.ready("detail")
    inbox = Inbox(lifeline)
    while True:
        inbox.wait(0.1)
        lifeline.heartbeat(7)

raise SystemExit(run_process("child", config.process, run))
"""


@pytest.fixture
def start(tmp_path):
    children = []

    def start_child(body="pass"):
        script = tmp_path / "child.py"
        script.write_text(textwrap.dedent(CHILD).replace("BODY", body))
        child = Child(
            "child",
            [sys.executable, str(script), "--run-dir", str(tmp_path)],
            directory=ROOT,
            environment={**os.environ, "PYTHONPATH": ROOT},
        )
        children.append(child)
        return child

    yield start_child
    for child in children:
        child.signal(signal.SIGKILL)
        child.process.wait()
        child.close()


def wait_for(condition, what):
    for _ in range(200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"waited 10 s for {what}")


def test_a_child_reports_ready_and_heartbeats_and_ends_with_its_lifeline(start):
    child = start()
    wait_for(lambda: child.read_reports() or child.heartbeats, "a heartbeat")
    wait_for(lambda: child.read_reports() or child.heartbeats, "a heartbeat")
    assert child.ready == Ready(detail="detail")
    child.cut_lifeline()
    assert child.process.wait(timeout=5) == 0


@pytest.mark.parametrize(
    ("body", "exit_code", "sentence"),
    [
        ("raise ConfigError('--x is 1; it must be 2.')", 2, "--x is 1; it must be 2."),
        ("raise ProcessError('rank 1 is gone.')", 1, "rank 1 is gone."),
        ("raise ZeroDivisionError('oh')", 1, "internal error: ZeroDivisionError: oh"),
    ],
)
def test_a_failing_child_says_why_in_its_report_and_its_log(start, body, exit_code, sentence):
    child = start(body)
    assert child.process.wait(timeout=10) == exit_code
    child.read_to_end()
    assert child.failure == Failure(exit_code=exit_code, sentence=sentence)
    assert f"ends: {sentence}" in child.log_tail[-1]
    assert child.describe_end() == (
        f"child (pid {child.process.pid}) exited with {exit_code}: {sentence}"
    )


def test_a_killed_child_is_described_by_its_signal(start):
    child = start()
    child.signal(signal.SIGKILL)
    child.process.wait(timeout=5)
    assert child.describe_end() == f"child (pid {child.process.pid}) was killed by SIGKILL"


def test_a_child_stuck_in_a_library_call_dies_with_its_parent(tmp_path):
    # The parent is killed; its child sleeps and looks at no pipe. The kernel must end it.
    script = tmp_path / "child.py"
    script.write_text(
        textwrap.dedent(CHILD).replace("BODY", "print('up', flush=True); time.sleep(60)")
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, time\n"
            "read, write = os.pipe()\n"
            "p = subprocess.Popen([sys.executable, *sys.argv[1:], '--lifeline-fd', str(read)],"
            " pass_fds=(read,))\n"
            "print(p.pid, flush=True)\n"
            "time.sleep(60)",
            *(str(script), "--run-dir", str(tmp_path)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert parent.stdout.readline() == "up\n"
    parent.kill()
    parent.wait()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or is_zombie(pid), "the orphan's end")
    parent.stdout.close()


def is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True

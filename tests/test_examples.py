"""The examples end as programs should, and the documentation shows them as they are."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STARTS_FOR_EVER = """
import os, sys
print("starting", file=sys.stderr, flush=True)
if "--lifeline-fd" in sys.argv:
    os.read(int(sys.argv[sys.argv.index("--lifeline-fd") + 1]), 1)
else:
    import signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.pause()
"""
# A background job of a shell without job control starts with SIGINT ignored, and so would its
# children: the program under test listens whatever started the tests.
WITH_ANOTHER_LAUNCHER = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from frontend.client import engine_process
engine_process.LAUNCHER = "launch.py"
sys.argv = ["examples." + sys.argv[1]]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("name", ["offline", "client", "async_client"])
def test_the_client_page_shows_the_example(name):
    source = (ROOT / "examples" / f"{name}.py").read_text()
    assert f"```python\n{source}```" in (ROOT / "docs" / "client.md").read_text()


def example(name, *arguments):
    return subprocess.run(
        [sys.executable, "-m", f"examples.{name}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", ["client", "async_client"])
@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("no/such", "'no/such' is neither a run directory nor an address"),
        ("http://127.0.0.1:9", "http://127.0.0.1:9 is no client address"),
    ],
)
def test_an_address_without_an_engine_is_one_sentence(name, address, sentence):
    done = example(name, address)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(sentence)


@pytest.mark.parametrize("name", ["offline", "demo"])
def test_an_interrupt_while_the_engine_starts_ends_it_in_silence(name, tmp_path):
    (tmp_path / "launch.py").write_text(STARTS_FOR_EVER)
    program = subprocess.Popen(
        [sys.executable, "-c", WITH_ANOTHER_LAUNCHER, name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with program:
        try:
            assert program.stderr.readline() == "starting\n"
            program.send_signal(signal.SIGINT)
            _, err = program.communicate(timeout=30)
        finally:
            program.kill()
    assert (program.returncode, err) == (130, "")


def test_a_demo_that_nobody_reads_ends_in_silence():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as nobody:
        done = subprocess.run(
            [sys.executable, "-m", "examples.demo"],
            cwd=ROOT,
            stdout=nobody,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")

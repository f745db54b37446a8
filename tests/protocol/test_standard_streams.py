import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import os, sys
os.close({descriptor})
sys.{name} = None
from protocol.standard_streams import open_standard_streams
open_standard_streams()
print("out")
print("err", file=sys.stderr)
assert sys.stdin.read() == ""
assert os.pipe()[0] > 2
assert (os.readlink("/proc/self/fd/{descriptor}") == os.devnull)
"""


@pytest.mark.parametrize(("descriptor", "name"), [(0, "stdin"), (1, "stdout"), (2, "stderr")])
def test_a_closed_stream_is_opened_to_nowhere(descriptor, name):
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(descriptor=descriptor, name=name)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if name == "stdout" else "out\n")
    assert done.stderr == ("" if name == "stderr" else "err\n")

"""What has to be in place before any test module is imported."""

import contextlib
import os
from pathlib import Path

import pytest

_GPU = Path("/dev/nvidiactl")


def pytest_configure(config):
    """Give each of several test runners a core of its own, which its processes inherit.

    Ranks count the cores they may use and start a thread on each: side by side on the same
    cores, their threads would wait for each other most of the time.
    """
    if not hasattr(config, "workerinput"):
        return
    number = int(config.workerinput["workerid"].removeprefix("gw"))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def _interpret_kernels():
    """Have Triton run kernels in numpy, in this process alone, where there is no GPU.

    Triton looks when it is imported, which transformers may do, and whenever it meets a kernel. The
    environment says so for the import only, so that no subprocess inherits it.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        import triton
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = True


if not _GPU.exists():
    with contextlib.suppress(ImportError):  # it is made for Linux alone
        _interpret_kernels()

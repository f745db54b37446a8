"""Where kernels are tried: on a GPU if there is one, else in Triton's interpreter, in numpy."""

import importlib.util

import numpy as np
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if importlib.util.find_spec("triton") is None:  # it is made for Linux alone
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device():
    """The device whose tensors the kernels take."""
    if HAS_GPU:
        yield torch.device("cuda")
        return
    # Infinities and NaN come and go without a word, as they do on a GPU.
    with np.errstate(all="ignore"):
        yield torch.device("cpu")


@pytest.fixture(autouse=True)
def _loops_with_bounds_of_tensors(monkeypatch: pytest.MonkeyPatch):
    """Let a kernel's loop end where a tensor says.

    The interpreter keeps a number as an array of one, which NumPy since 2.4 takes for no index.
    """
    if HAS_GPU:
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)

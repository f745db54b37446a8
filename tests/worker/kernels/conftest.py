"""Kernels run in Triton's interpreter where there is no GPU. It must know before it is imported."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


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

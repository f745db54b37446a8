"""Where kernels are tried: on a GPU if there is one, else in Triton's interpreter, in numpy."""

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:  # it is made for Linux alone
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device():
    """The device whose tensors the kernels take."""
    import triton

    if torch.cuda.is_available():
        yield torch.device("cuda")
    elif triton.knobs.runtime.interpret:
        # Infinities and NaN come and go without a word, as they do on a GPU.
        with np.errstate(all="ignore"):
            yield torch.device("cpu")
    else:
        pytest.skip("neither a GPU nor Triton's interpreter")

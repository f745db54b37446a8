"""Benchmarks import kernels, which only Triton's interpreter can run where there is no GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

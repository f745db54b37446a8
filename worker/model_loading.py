"""From a model path to a model with weights, ready to compute."""

import time
from pathlib import Path

import torch

from worker.gguf_file import read_gguf_header
from worker.gguf_weights import load_gguf
from worker.layers.experts import Experts
from worker.layers.head_norm import HeadNorm
from worker.layers.linear import Linear, ProductChoice
from worker.layers.norm import RMSNorm
from worker.model_config import ModelConfig
from worker.model_files import is_gguf
from worker.models import ARCHITECTURES
from worker.models.causal_lm import CausalLM
from worker.parallel import TensorParallel
from worker.quantization import Storage
from worker.quantization_config import Int4Checkpoint
from worker.quantized_checkpoint import QuantizedCheckpoint
from worker.quantizing import quantize_to_fp8, quantize_to_int4
from worker.safetensors_weights import load_safetensors
from worker.tensor_reader import reading_threads
from worker.weights import LoadReport, fill_with_dummies


def load_model(
    path: Path,
    config: ModelConfig,
    *,
    group: TensorParallel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    dummy_seed: int | None = None,
    products: ProductChoice | None = None,
    storage: Storage = "none",
) -> tuple[CausalLM, LoadReport]:
    """Build a rank's part of a model and fill it from `path`, or with dummies of `dummy_seed`.

    `products` chooses its matrix products where the device has a choice, `storage` says how they
    keep their weights.
    Raises ModelFileError naming file and tensor.
    """
    started = time.monotonic()
    model = ARCHITECTURES[config.architecture](
        config, group=group, max_model_len=max_model_len, dtype=dtype, device=device
    )
    read_started = time.monotonic()
    with torch.inference_mode():
        checkpoint = None
        if config.quantization is not None and dummy_seed is None:
            checkpoint = QuantizedCheckpoint(model, config.quantization, storage)
        weights = list(model.weights())
        num_bytes = sum(weight.target.nbytes for weight in weights)
        threads = reading_threads(group.size)
        file_bytes = 0
        if dummy_seed is not None:
            fill_with_dummies(weights, seed=dummy_seed)
        elif is_gguf(path):
            file_bytes = load_gguf(
                read_gguf_header(path),
                weights,
                head_dim=config.head_dim,
                ignored=model.ignored_weights(),
                threads=threads,
            )
        else:
            ignored = model.ignored_weights()
            if checkpoint is not None:
                ignored |= checkpoint.ignored_weights(weights)
                weights = checkpoint.expand(weights)
            file_bytes = load_safetensors(path, weights, ignored=ignored, threads=threads)
        read_seconds = time.monotonic() - read_started
        # The views of the weights must go, or they keep what preparing gives back.
        del weights
        if checkpoint is not None:
            checkpoint.finish()
        elif storage == "fp8":
            quantize_to_fp8(model)
        elif isinstance(config.quantization, Int4Checkpoint) and storage == "int4":
            quantize_to_int4(model, config.quantization.group_size)
        for module in model.modules():
            if isinstance(module, Linear):
                module.prepare(products)
            elif isinstance(module, RMSNorm | HeadNorm | Experts):
                module.prepare()
    return model, LoadReport(num_bytes, file_bytes, read_seconds, time.monotonic() - started)

"""From a worker's flags to a runner that computes: model, weights, cache, attention."""

import logging
import os
from pathlib import Path

import torch

from protocol.errors import ConfigError
from protocol.messages import EngineFacts
from worker.attention.torch_attention import TorchAttention
from worker.config import WorkerConfig
from worker.kv_cache import KVCache, KVCacheShape, available_memory_bytes, cpu_num_blocks
from worker.layers.linear import fewest_rows
from worker.model_config import ModelConfig
from worker.model_files import read_model_config
from worker.model_loading import load_model
from worker.model_runner import ModelRunner

CPU_BLOCK_SIZE = 16
CPU_MAX_NUM_SEQS = 64
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

log = logging.getLogger(__name__)


def build_model_runner(config: WorkerConfig) -> ModelRunner:
    """Load what the flags name and return its runner.

    Raises ConfigError for flags that do not fit model or machine, ModelFileError for files that
    cannot be used.
    """
    path = Path(config.model)
    model_config = read_model_config(path)
    device = _device(config)
    dtype = DTYPES["float32" if config.dtype == "auto" else config.dtype]
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // config.tp)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    model, report = load_model(
        path,
        model_config,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
    )
    log.info(
        "weights loaded bytes=%d seconds=%.1f gb_s=%.2f dtype=%s threads=%d",
        *(report.num_bytes, report.seconds, report.num_bytes / report.seconds / 1e9),
        *(str(dtype).removeprefix("torch."), threads),
    )
    shape = _cache_shape(config, model_config)
    num_blocks = config.num_blocks or cpu_num_blocks(
        shape.block_bytes(dtype), tp=config.tp, available_bytes=available_memory_bytes()
    )
    cache = KVCache(shape, num_blocks, dtype=dtype, device=device)
    log.info(
        "cache blocks=%d block_size=%d bytes=%d", num_blocks, shape.block_size, cache.data.nbytes
    )
    facts = EngineFacts(
        rank=config.rank,
        back_end="torch",
        block_size=shape.block_size,
        num_blocks=num_blocks,
        slots=config.max_num_seqs or CPU_MAX_NUM_SEQS,
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
    )
    return ModelRunner(
        model,
        TorchAttention(cache, model_config.num_heads),
        cache,
        facts,
        tp=config.tp,
        min_rows=fewest_rows(device, dtype),
        device=device,
    )


def _device(config: WorkerConfig) -> torch.device:
    """Return where to compute. Raises ConfigError for what this version cannot do."""
    if config.device == "cuda":
        raise ConfigError("--device cuda is not supported yet: use cpu.")
    if config.tp > 1:
        raise ConfigError(f"--tp {config.tp} is not supported yet: use 1.")
    if config.attention not in ("auto", "torch"):
        raise ConfigError(f"--attention {config.attention} needs CUDA: use torch or auto.")
    return torch.device("cpu")


def _cache_shape(config: WorkerConfig, model: ModelConfig) -> KVCacheShape:
    return KVCacheShape(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size or CPU_BLOCK_SIZE,
    )

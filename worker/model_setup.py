"""From a worker's flags to a runner that computes: model, weights, cache, attention."""

import logging
import os
from pathlib import Path

import torch

from protocol.errors import ConfigError
from protocol.messages import EngineFacts
from protocol.run_dir import RunDir
from worker.attention.torch_attention import TorchAttention
from worker.config import WorkerConfig
from worker.kv_cache import KVCache, KVCacheShape, available_memory_bytes, cpu_num_blocks
from worker.layers.linear import fewest_rows
from worker.model_files import read_model_config
from worker.model_loading import load_model
from worker.model_runner import ModelRunner
from worker.parallel import OneRank, TensorParallel, join_ranks
from worker.rendezvous import meet
from worker.shard import divide_heads

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
    model_config.require_legal_tp(config.tp)
    device = _device(config)
    dtype = DTYPES["float32" if config.dtype == "auto" else config.dtype]
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // config.tp)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    group = _join_group(config, device)
    model, report = load_model(
        path,
        model_config,
        group=group,
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
    heads = divide_heads(
        model_config.num_heads, model_config.num_kv_heads, rank=config.rank, size=config.tp
    )
    shape = KVCacheShape(
        num_layers=model_config.num_layers,
        num_kv_heads=heads.key_value.size,
        head_dim=model_config.head_dim,
        block_size=config.block_size or CPU_BLOCK_SIZE,
    )
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
        TorchAttention(cache, heads.query.size),
        cache,
        facts,
        group=group,
        min_rows=fewest_rows(device, dtype),
        device=device,
    )


def _device(config: WorkerConfig) -> torch.device:
    """Return where to compute. Raises ConfigError for what this version cannot do."""
    if config.device == "cuda":
        raise ConfigError("--device cuda is not supported yet: use cpu.")
    if config.attention not in ("auto", "torch"):
        raise ConfigError(f"--attention {config.attention} needs CUDA: use torch or auto.")
    return torch.device("cpu")


def _join_group(config: WorkerConfig, device: torch.device) -> TensorParallel:
    """Wait for the other ranks, if there are any, and connect to them. Raises ProcessError."""
    if config.tp == 1:
        return OneRank()
    store = meet(RunDir(config.process.run_dir).store(), rank=config.rank, size=config.tp)
    return join_ranks(
        store,
        rank=config.rank,
        size=config.tp,
        timeout_s=config.step_timeout_s,
        device=device,
    )

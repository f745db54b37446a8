"""From a worker's flags to a runner that computes: model, weights, cache, attention."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import Store

from protocol.errors import ConfigError
from protocol.messages import EngineFacts
from protocol.run_dir import RunDir
from protocol.user_cache import user_cache_dir
from worker.attention.base import LayerAttention
from worker.attention.choice import AttentionChoice, build_attention, choose_attention
from worker.attention.paged import PagedAttention
from worker.config import WorkerConfig
from worker.cuda_memory import measure_worst_step
from worker.graph_sizes import max_num_graphs
from worker.host_blocks import HostBlocks
from worker.kv_cache import (
    KVCache,
    KVCacheShape,
    available_memory_bytes,
    cpu_num_blocks,
    require_cpu_memory,
)
from worker.kv_rounding import kv_cache_dtype
from worker.layers.linear import fewest_rows
from worker.memory_plan import DEFAULT_NUM_SEQS, MemoryPlan, graph_reserve, require_weights_fit
from worker.model_config import ModelConfig
from worker.model_files import read_model_config
from worker.model_loading import load_model
from worker.model_runner import ModelRunner
from worker.models.causal_lm import CausalLM
from worker.parallel import OneRank, TensorParallel, join_ranks
from worker.product_table import ProductTable, parse_table
from worker.quantization import Storage, check_storage, choose_storage
from worker.rendezvous import meet, share
from worker.sampling_slots import SamplingSlots
from worker.shard import HeadShards, divide_heads
from worker.sharded_sampler import ShardedSampler
from worker.slot_sampler import TorchSlotSampler
from worker.table_files import SHIPPED, find_table, user_tables

if TYPE_CHECKING:
    from worker.cuda_sampler import CudaSampler
    from worker.tuned_products import TunedProducts

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
    dtype = _dtype(config, model_config, device)
    is_cuda = device.type == "cuda"
    storage = _storage(config, model_config, dtype, device)
    require_weights_fit(
        model_config,
        tp=config.tp,
        item_bytes=dtype.itemsize,
        storage=storage,
        available_bytes=torch.cuda.mem_get_info(device)[1] if is_cuda else available_memory_bytes(),
    )
    kv_dtype = kv_cache_dtype(config.kv_cache_dtype, dtype)
    choice = _attention(config, model_config, dtype, device)
    heads = divide_heads(
        model_config.num_heads, model_config.num_kv_heads, rank=config.rank, size=config.tp
    )
    shape = KVCacheShape(
        num_layers=model_config.num_layers,
        num_kv_heads=heads.key_value.size,
        head_dim=model_config.head_dim,
        block_size=choice.block_size(config.block_size),
    )
    threads = num_threads(config, device)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    max_model_len = model_config.sequence_limit(config.max_model_len)
    own_table = _own_table(device, dtype) if config.rank == 0 else None
    store = _meet(config)
    table = _common_table(own_table, store)
    group = _join_group(config, store, device)
    products = _tuned_products(table, device) if table.entries else None
    model, report = load_model(
        path,
        model_config,
        group=group,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
        products=products,
        storage=storage,
    )
    if products is not None:
        products.warm()
    log.info(
        "weights loaded bytes=%d seconds=%.1f read_bytes=%d read_seconds=%.2f gb_s=%.2f dtype=%s "
        "quantization=%s threads=%d",
        *(report.num_bytes, report.seconds, report.file_bytes, report.read_seconds),
        report.file_bytes / report.read_seconds / 1e9,
        *(str(dtype).removeprefix("torch."), storage, threads),
    )
    slots = _slots(config, device)
    # One more than there are: rows that only fill up a graph's bucket use the last.
    sampling = SamplingSlots(slots + 1, model_config.vocab_size, device)
    cuda_sampler = _cuda_sampler(sampling, model_config, group) if device.type == "cuda" else None
    num_blocks = config.num_blocks or _num_blocks(
        config,
        model_config,
        model,
        choice,
        shape,
        heads,
        cuda_sampler,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
    )
    cache = _allocate(shape, num_blocks, choice, dtype=kv_dtype, device=device)
    log.info(
        "cache blocks=%d block_size=%d bytes=%d dtype=%s",
        *(num_blocks, shape.block_size, cache.data.nbytes, str(kv_dtype).removeprefix("torch.")),
    )
    attention = build_attention(
        choice.name, cache, heads.query.size, layer_attentions(model_config), dtype
    )
    num_host_blocks = int(config.swap_space_gib * 2**30) // shape.block_bytes(kv_dtype)
    host_blocks = _host_blocks(cache, num_host_blocks) if num_host_blocks else None
    facts = EngineFacts(
        rank=config.rank,
        back_end=choice.name,
        block_size=shape.block_size,
        num_blocks=num_blocks,
        slots=slots,
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        host_blocks=num_host_blocks,
        swap_block_s=host_blocks.measure() if host_blocks else 0.0,
    )
    runner = ModelRunner(
        model,
        attention,
        cache,
        facts,
        sampling=sampling,
        sampler=cuda_sampler
        or TorchSlotSampler(sampling, ShardedSampler(model_config.vocab_size, group)),
        tp=config.tp,
        # Rows that only fill up a step would have experts read that no other row needs.
        min_rows=fewest_rows(device, dtype) if model_config.experts is None else 1,
        device=device,
        host_blocks=host_blocks,
    )
    if cuda_sampler and isinstance(attention, PagedAttention) and not config.enforce_eager:
        runner.capture_graphs(attention, cuda_sampler.draw)
    return runner


def layer_attentions(config: ModelConfig) -> tuple[LayerAttention, ...]:
    """Return how each layer of a model attends."""
    return tuple(LayerAttention(config.attention_scale, window) for window in config.windows)


def _host_blocks(cache: KVCache, num_blocks: int) -> HostBlocks:
    """Set host memory aside. Raises ConfigError if there is too little."""
    needed = num_blocks * cache.block(cache.pad_block).nbytes
    available = available_memory_bytes()
    if needed > available:
        raise ConfigError(
            f"--swap-space: {num_blocks} blocks need {needed / (1 << 30):.1f} GiB a rank, and "
            f"{available / (1 << 30):.1f} GiB of memory are free; lower it."
        )
    return HostBlocks(cache, num_blocks)


def _cuda_sampler(
    sampling: SamplingSlots, model_config: ModelConfig, group: TensorParallel
) -> "CudaSampler":
    # Imported here because Triton is there only where there are GPUs.
    from worker.cuda_sampler import CudaSampler  # noqa: PLC0415

    return CudaSampler(sampling, model_config.vocab_size, group)


def _allocate(
    shape: KVCacheShape,
    num_blocks: int,
    choice: AttentionChoice,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    if device.type == "cpu":
        require_cpu_memory(
            num_blocks, shape.block_bytes(dtype), available_bytes=available_memory_bytes()
        )
    try:
        return KVCache(shape, num_blocks, dtype=dtype, device=device, layout=choice.layout)
    except torch.OutOfMemoryError as error:
        gib = num_blocks * shape.block_bytes(dtype) / (1 << 30)
        raise ConfigError(
            f"The KV cache of {num_blocks} blocks needs {gib:.1f} GiB, which the GPU does not have "
            "free: lower --num-blocks, or leave it out."
        ) from error


def num_threads(config: WorkerConfig, device: torch.device) -> int:
    """Return how many threads a rank computes with: the flag's, or its share of the cores.

    Warns, once for all ranks, where on CPU there is less than a core for each.
    """
    cores = len(os.sched_getaffinity(0))
    if device.type == "cpu" and config.rank == 0 and config.tp > cores:
        log.warning(
            "tp=%d exceeds cores=%d: ranks that wait for each other share a core, which is many "
            "times slower than --tp 1",
            *(config.tp, cores),
        )
    return config.threads or max(1, cores // config.tp)


def _device(config: WorkerConfig) -> torch.device:
    """Return where to compute. Raises ConfigError for what this version cannot do."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda needs a GPU and a torch built for it: use cpu.")
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    if config.rank >= torch.cuda.device_count():
        raise ConfigError(
            f"Rank {config.rank} needs a GPU of its own, and there are "
            f"{torch.cuda.device_count()}: lower --tp."
        )
    device = torch.device("cuda", config.rank)
    torch.cuda.set_device(device)
    # Where Triton, which is not imported yet, keeps what it has compiled.
    os.environ.setdefault("TRITON_CACHE_DIR", str(user_cache_dir(os.environ) / "triton"))
    return device


def _dtype(config: WorkerConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return DTYPES[model.dtype if device.type == "cuda" else "float32"]


def _storage(
    config: WorkerConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Storage:
    """Return how products keep their weights. Raises ConfigError for what a GPU cannot do."""
    storage = choose_storage(config.quantization, model.quantization)
    check_storage(
        storage,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=str(dtype).removeprefix("torch."),
        flag=config.quantization,
    )
    return storage


def _attention(
    config: WorkerConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> AttentionChoice:
    is_cuda = device.type == "cuda"
    choice = choose_attention(
        config.attention,
        capability=torch.cuda.get_device_capability(device) if is_cuda else None,
        dtype=dtype,
        head_dim=model.head_dim,
        is_fp8=config.kv_cache_dtype == "fp8",
    )
    log.info("attention back_end=%s because: %s", choice.name, choice.reason)
    return choice


def _meet(config: WorkerConfig) -> Store | None:
    """Wait for the other ranks, if there are any. Raises ProcessError."""
    if config.tp == 1:
        return None
    return meet(RunDir(config.process.run_dir).store(), rank=config.rank, size=config.tp)


def _own_table(device: torch.device, dtype: torch.dtype) -> ProductTable:
    """Return what is known about products on this GPU. Raises ConfigError for a damaged table."""
    name = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        return ProductTable("CPU", name, {})
    directories = (SHIPPED, user_tables(user_cache_dir(os.environ)))
    return find_table(torch.cuda.get_device_name(device), name, directories)


def _common_table(table: ProductTable | None, store: Store | None) -> ProductTable:
    """Return rank 0's table on every rank: all choose the same kernels. Only rank 0 gives one."""
    if store is None:
        assert table is not None, "a rank alone is rank 0"
        return table
    return parse_table(share(store, "products", None if table is None else table.to_json()))


def _tuned_products(table: ProductTable, device: torch.device) -> "TunedProducts":
    # Imported here because Triton is there only where there are GPUs.
    from worker.tuned_products import TunedProducts  # noqa: PLC0415

    return TunedProducts(table, device)


def _join_group(config: WorkerConfig, store: Store | None, device: torch.device) -> TensorParallel:
    """Connect to the ranks that have met. Raises ProcessError."""
    if store is None:
        return OneRank()
    return join_ranks(
        store,
        rank=config.rank,
        size=config.tp,
        timeout_s=config.step_timeout_s,
        device=device,
    )


def _slots(config: WorkerConfig, device: torch.device) -> int:
    return config.max_num_seqs or DEFAULT_NUM_SEQS[device.type]


def _num_blocks(
    config: WorkerConfig,
    model_config: ModelConfig,
    model: CausalLM,
    choice: AttentionChoice,
    shape: KVCacheShape,
    heads: HeadShards,
    cuda_sampler: "CudaSampler | None",
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Return how many blocks memory allows."""
    block_bytes = shape.block_bytes(kv_dtype)
    if cuda_sampler is None:
        return cpu_num_blocks(block_bytes, tp=config.tp, available_bytes=available_memory_bytes())
    slots = _slots(config, device)
    scratch = KVCache(shape, 0, dtype=kv_dtype, device=device, layout=choice.layout)
    attention = build_attention(
        choice.name, scratch, heads.query.size, layer_attentions(model_config), dtype
    )
    measured = measure_worst_step(
        model,
        attention,
        scratch,
        cuda_sampler,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=slots,
        max_model_len=model_config.sequence_limit(config.max_model_len),
    )
    has_graphs = choice.is_graphable and not config.enforce_eager
    plan = MemoryPlan(
        total=measured.total,
        utilization=config.gpu_memory_utilization,
        weights=measured.weights,
        workspace=measured.workspace,
        other=measured.other,
        graphs=graph_reserve(
            max_num_graphs(slots) if has_graphs else 0, slots, model_config.vocab_size
        ),
        block_bytes=block_bytes,
    )
    log.info(
        "memory total=%d weights=%d workspace=%d graphs=%d other=%d",
        *(plan.total, plan.weights, plan.workspace, plan.graphs, plan.other),
    )
    return plan.num_blocks

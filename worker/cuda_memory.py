"""How many KV blocks fit on a GPU: what is left once a worst step has been run.

total · utilization  =  weights + a step's peak + what is not ours  +  graphs  +  KV cache
                        ├──────────── measured ─────────────────┤   reserved      the rest
"""

from dataclasses import dataclass

import numpy as np
import torch

from protocol.errors import ConfigError
from worker.attention.base import AttentionBackend
from worker.batch import ChunkRows, ForwardBatch
from worker.kv_cache import KVCache
from worker.models.causal_lm import CausalLM
from worker.sampler import RowSampler, SamplingRows

_MIB = 1 << 20
GRAPH_BYTES = 12 * _MIB
"""What the driver keeps of one captured step of a few hundred kernels."""
GRAPH_POOL_BYTES = 256 * _MIB
"""Activations of the largest captured step, all but its logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """A GPU's memory after a worst step, in bytes."""

    total: int
    used_at_peak: int
    """By everybody: weights and the step's tensors, the driver, other processes."""


def cuda_num_blocks(
    memory: GpuMemory, *, utilization: float, graph_reserve: int, block_bytes: int
) -> int:
    """Return how many blocks fit when `--num-blocks` does not say.

    Raises ConfigError, with the numbers, if that is not one.
    """
    budget = int(memory.total * utilization)
    left = budget - memory.used_at_peak - graph_reserve
    if left < block_bytes:
        raise ConfigError(
            f"No room is left for the KV cache: of {_gib(memory.total)} GPU memory "
            f"--gpu-memory-utilization {utilization:g} allows {_gib(budget)}, a step uses "
            f"{_gib(memory.used_at_peak)} at its peak and CUDA graphs are given "
            f"{_gib(graph_reserve)}; a block needs {_gib(block_bytes)}. Raise it, lower "
            "--max-num-batched-tokens or --max-num-seqs, or use more GPUs (--tp)."
        )
    return left // block_bytes


def graph_reserve(num_graphs: int, max_rows: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Return the bytes to keep for graphs of up to `max_rows` rows; 0 without graphs."""
    if not num_graphs:
        return 0
    return GRAPH_POOL_BYTES + num_graphs * GRAPH_BYTES + max_rows * vocab_size * dtype.itemsize


def measure_worst_step(
    model: CausalLM,
    attention: AttentionBackend,
    cache: KVCache,
    sampler: RowSampler,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    vocab_size: int,
) -> GpuMemory:
    """Run the step that needs most memory, over a pad block alone; return what it used.

    It computes as many new tokens as a step may have and samples for as many sequences as there
    may be, all of them with filters.
    """
    device = cache.data.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        batch = worst_batch(
            cache,
            num_tokens=max(max_num_batched_tokens, max_num_seqs),
            max_model_len=max_model_len,
            num_sampled=max_num_seqs,
        )
        hidden = model(batch.tokens, batch.positions, attention.start_step(batch))
        logits = model.logits(hidden.index_select(0, batch.logit_rows)).float()
        sampler.sample(logits, worst_sampling(max_num_seqs, vocab_size, device))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    foreign = total - free - torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    return GpuMemory(total=total, used_at_peak=peak + foreign)


def worst_batch(
    cache: KVCache, *, num_tokens: int, max_model_len: int, num_sampled: int
) -> ForwardBatch:
    """Return a step of chunks that start their sequences and write to the pad block only."""
    device = cache.data.device
    counts = [max_model_len] * (num_tokens // max_model_len)
    if rest := num_tokens % max_model_len:
        counts.append(rest)
    pad = torch.full((1,), cache.pad_block, dtype=torch.int64, device=device)
    chunks: list[ChunkRows] = []
    first_row = 0
    for count in counts:
        table = pad.expand(-(-count // cache.shape.block_size))
        chunks.append(ChunkRows(first_row=first_row, start=0, count=count, block_table=table))
        first_row += count
    nothing = pad.new_empty(0)
    return ForwardBatch(
        tokens=pad.new_zeros(num_tokens),
        positions=torch.cat([torch.arange(count, device=device) for count in counts]),
        cache_positions=(pad * cache.shape.block_size).expand(num_tokens).contiguous(),
        num_tokens=num_tokens,
        num_decode=0,
        decode_lengths=np.zeros(0, dtype=np.int32),
        decode_blocks=nothing.view(0, 0),
        opened_blocks=(),
        chunks=tuple(chunks),
        num_sampled=num_sampled,
        logit_rows=torch.arange(num_sampled, device=device),
    )


def worst_sampling(num_rows: int, vocab_size: int, device: torch.device) -> SamplingRows:
    """Return parameters that make every row be filtered."""
    rows = torch.arange(num_rows, device=device)
    return SamplingRows(
        temperatures=torch.ones(num_rows, device=device),
        top_k=torch.full_like(rows, vocab_size),
        top_p=torch.full((num_rows,), 0.5, device=device),
        min_p=torch.zeros(num_rows, device=device),
        seeds=rows,
        positions=rows,
        unfiltered=rows[:0],
        filtered=rows,
        max_top_k=0,
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"

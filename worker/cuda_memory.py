"""How many KV blocks fit on a GPU: what is left once a worst step has been run.

total · utilization  =  weights + a step's peak + what is not ours  +  graphs  +  KV cache
                        ├──────────── measured ─────────────────┤   reserved      the rest
"""

from dataclasses import dataclass

import numpy as np
import torch

from protocol.errors import ConfigError
from worker.attention.base import AttentionBackend
from worker.batch import BatchBuilder, ForwardBatch, SampledRows
from worker.kv_cache import KVCache
from worker.models.causal_lm import CausalLM
from worker.slot_sampler import SlotSampler
from worker.step_rows import Chunk, StepRows, int32_view

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
    sampler: SlotSampler,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> GpuMemory:
    """Run the step that needs most memory, over a pad block alone; return what it used.

    It computes as many new tokens as a step may have and samples for as many sequences as there may
    be, whose logits ranks gather as for rows with filters.
    """
    device = cache.data.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        batch = worst_batch(
            cache,
            num_tokens=max(max_num_batched_tokens, max_num_seqs),
            max_model_len=max_model_len,
        )
        hidden = model(batch.tokens, batch.positions, attention.start_step(batch))
        logits = model.logits(hidden[:max_num_seqs].contiguous())
        sampler.whole_logits(logits)
        sampler.sample(logits, worst_sampled(max_num_seqs, device))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    foreign = total - free - torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    return GpuMemory(total=total, used_at_peak=peak + foreign)


def worst_batch(cache: KVCache, *, num_tokens: int, max_model_len: int) -> ForwardBatch:
    """Return a step of chunks that start their sequences and write to the pad block only."""
    counts = [max_model_len] * (num_tokens // max_model_len)
    if rest := num_tokens % max_model_len:
        counts.append(rest)
    nothing = int32_view(b"")
    rows = StepRows(
        step_id=0,
        num_rows=len(counts),
        leaves=nothing,
        joins=(),
        copies=nothing.reshape(0, 2),
        new_blocks=nothing.reshape(0, 3),
        decode_rows=nothing,
        decode_slots=nothing,
        decode_positions=nothing,
        chunks=tuple(
            Chunk(
                row=row,
                slot=row,
                start=0,
                token_ids=np.zeros(count, dtype=np.int32),
                is_last=True,
            )
            for row, count in enumerate(counts)
        ),
        failures={},
    )
    builder = BatchBuilder(
        block_size=cache.shape.block_size,
        pad_block=cache.pad_block,
        min_rows=1,
        device=cache.data.device,
    )
    width = -(-max(counts) // cache.shape.block_size)
    tables = np.full((len(counts), width), cache.pad_block, dtype=np.int32)
    last_tokens = torch.zeros(0, dtype=torch.int64, device=cache.data.device)
    return builder.build(rows, tables, last_tokens)


def worst_sampled(num_rows: int, device: torch.device) -> SampledRows:
    """Return rows of as many slots."""
    slots = torch.arange(num_rows, device=device)
    return SampledRows(slots=slots, indices=slots, host_slots=np.arange(num_rows, dtype=np.int32))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"

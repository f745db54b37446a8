"""What a worst step needs of a GPU, found by running one (`worker.memory_plan` does the rest)."""

from dataclasses import dataclass

import numpy as np
import torch

from protocol.messages import MAX_TOP_LOGPROBS
from worker.attention.base import AttentionBackend
from worker.batch import BatchBuilder, ForwardBatch, SampledRows
from worker.kv_cache import KVCache
from worker.models.causal_lm import CausalLM
from worker.prompt_logprobs import ROWS_AT_ONCE, score
from worker.slot_sampler import SlotSampler
from worker.step_rows import Chunk, StepRows, int32_view


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """A GPU's memory in bytes."""

    total: int
    weights: int
    """All that is there without a step: the weights, and a little else."""
    workspace: int
    """What a worst step adds at its peak."""
    other: int
    """The driver's and other processes'."""


def measure_worst_step(
    model: CausalLM,
    attention: AttentionBackend,
    cache: KVCache,
    sampler: SlotSampler,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> MeasuredMemory:
    """Run the step that needs most memory, over a pad block alone; return what it used.

    What it used stays with torch, for the steps to come: to get it anew would make the first of
    them wait for the device.

    It computes as many new tokens as a step may have and samples for as many sequences as there may
    be, whose logits ranks gather, and copy, as for rows with filters and edits. Then it scores as
    many prompt tokens as are scored at once.
    """
    device = cache.data.device
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_reserved(device)
    with torch.inference_mode():
        batch = worst_batch(
            cache,
            num_tokens=max(max_num_batched_tokens, max_num_seqs),
            max_model_len=max_model_len,
        )
        # Of all rows: the last layer is as hungry as the others if every row is wanted.
        hidden = model(batch.tokens, batch.positions, attention.start_step(batch))
        logits = model.logits(hidden[:max_num_seqs].contiguous())
        whole = sampler.whole_logits(logits)
        edited = torch.empty(whole.shape, dtype=torch.float32, device=device)
        sampler.sample(logits, worst_sampled(max_num_seqs, device))
        del whole, edited
        tokens = torch.zeros(ROWS_AT_ONCE, dtype=torch.int64, device=device)
        score(model, sampler, hidden[:ROWS_AT_ONCE], tokens[: len(hidden)], MAX_TOP_LOGPROBS)
    torch.cuda.synchronize(device)
    workspace = torch.cuda.memory_reserved(device) - weights
    free, total = torch.cuda.mem_get_info(device)
    other = total - free - torch.cuda.memory_reserved(device)
    return MeasuredMemory(total=total, weights=weights, workspace=workspace, other=other)


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
        swap_outs=nothing.reshape(0, 2),
        swap_ins=nothing.reshape(0, 2),
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

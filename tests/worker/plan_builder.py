"""Plans from plain lists, for tests."""

from collections.abc import Sequence

from protocol.columns import pack_int32
from protocol.messages import EngineFacts, Join, SamplingParams, StepPlan
from worker.runner import StepOutput, StepRunner

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=100)


def make_facts(
    *,
    rank: int = 0,
    block_size: int = 4,
    num_blocks: int = 16,
    slots: int = 4,
    max_model_len: int = 32,
    vocab_size: int = 1000,
    host_blocks: int = 0,
) -> EngineFacts:
    return EngineFacts(
        rank=rank,
        back_end="checksum",
        block_size=block_size,
        num_blocks=num_blocks,
        slots=slots,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        host_blocks=host_blocks,
    )


def make_join(
    slot: int,
    token_ids: Sequence[int],
    blocks: Sequence[int],
    *,
    generation: int = 0,
    prompt_len: int | None = None,
    params: SamplingParams = GREEDY,
) -> Join:
    return Join(
        slot=slot,
        generation=generation,
        token_ids=pack_int32(token_ids),
        prompt_len=prompt_len or len(token_ids) or 1,
        params=params,
        block_table=pack_int32(blocks),
    )


def make_plan(
    step_id: int,
    *,
    leaves: Sequence[int] = (),
    joins: Sequence[Join] = (),
    copies: Sequence[tuple[int, int]] = (),
    swap_outs: Sequence[tuple[int, int]] = (),
    swap_ins: Sequence[tuple[int, int]] = (),
    new_blocks: Sequence[tuple[int, int, int]] = (),
    decode: Sequence[int] | None = (),
    chunks: Sequence[tuple[int, int, int, int]] = (),
    groups: Sequence[tuple[int, int, int]] | None = None,
) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        leaves=pack_int32(leaves),
        joins=list(joins),
        copies=_pack_rows(copies),
        swap_outs=_pack_rows(swap_outs),
        swap_ins=_pack_rows(swap_ins),
        new_blocks=_pack_rows(new_blocks),
        decode=None if decode is None else pack_int32(decode),
        chunks=_pack_rows(chunks),
        groups=None if groups is None else _pack_rows(groups),
    )


def _pack_rows(rows: Sequence[tuple[int, ...]]) -> bytes:
    return pack_int32(value for row in rows for value in row)


def execute(runner: StepRunner, plan: StepPlan) -> StepOutput:
    """Launch a plan and wait for what it produced."""
    return runner.launch(plan).output()

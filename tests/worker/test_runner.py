import numpy as np

from protocol.errors import ErrorCode
from worker.runner import assemble_output, out_of_memory_output
from worker.step_rows import Chunk, StepRows, int32_view

NUMERIC, MEMORY = ErrorCode.NUMERIC, ErrorCode.OUT_OF_MEMORY


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def make_rows(failures: dict[int, ErrorCode] | None = None) -> StepRows:
    """Six rows: 0 to 2 decode, 3 is a middle chunk, 4 and 5 are last chunks; less `failures`."""
    failures = failures or {}
    decode = [row for row in range(3) if row not in failures]
    chunks = [
        Chunk(row=row, slot=row, start=0, token_ids=column(7), is_last=row > 3)
        for row in range(3, 6)
        if row not in failures
    ]
    return StepRows(
        step_id=1,
        num_rows=6,
        leaves=int32_view(b""),
        joins=(),
        swap_outs=int32_view(b"").reshape(-1, 2),
        swap_ins=int32_view(b"").reshape(-1, 2),
        copies=int32_view(b"").reshape(-1, 2),
        new_blocks=int32_view(b"").reshape(-1, 3),
        decode_rows=column(*decode),
        decode_slots=column(*decode),
        decode_positions=column(*decode),
        chunks=tuple(chunks),
        failures=failures,
    )


def test_tokens_and_counts_are_in_row_order() -> None:
    output = assemble_output(make_rows(), column(10, 11, 12, 14, 15), {})
    assert output.tokens.tolist() == [10, 11, 12, 14, 15]
    assert output.counts.tolist() == [1, 1, 1, 0, 1, 1]
    assert output.failures.tolist() == []


def test_a_row_that_fails_in_this_step_gives_no_token() -> None:
    output = assemble_output(make_rows(), column(10, 11, 12, 14, 15), {4: NUMERIC, 1: NUMERIC})
    assert output.tokens.tolist() == [10, 12, 15]
    assert output.counts.tolist() == [1, -1, 1, 0, -1, 1]
    assert output.failures.tolist() == [NUMERIC, NUMERIC]


def test_rows_that_failed_earlier_were_not_sampled() -> None:
    rows = make_rows({5: MEMORY, 0: NUMERIC, 3: MEMORY})
    output = assemble_output(rows, column(11, 12, 14), {2: NUMERIC})
    assert output.tokens.tolist() == [11, 14]
    assert output.counts.tolist() == [-1, 1, -1, -1, 1, -1]
    assert output.failures.tolist() == [NUMERIC, NUMERIC, MEMORY, MEMORY]


def test_rule_9_out_of_memory_fails_every_row_and_leaves_older_codes() -> None:
    output = out_of_memory_output(make_rows({1: NUMERIC}))
    assert output.tokens.tolist() == []
    assert output.counts.tolist() == [-1] * 6
    assert output.failures.tolist() == [MEMORY, NUMERIC, MEMORY, MEMORY, MEMORY, MEMORY]

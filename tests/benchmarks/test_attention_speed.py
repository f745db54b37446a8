import json
import time
from functools import partial

import pytest
import torch

from tests.worker.plain_kernels import PlainKernels

pytest.importorskip("triton")

from benchmarks import attention_speed
from benchmarks.attention_speed import (
    SPLIT_LENGTHS,
    Batch,
    Inputs,
    Table,
    Variant,
    batches,
    library_variants,
    make_inputs,
    triton_variant,
    tunings,
)

HEADS = (4, 2, 16)
make = partial(make_inputs, (5, 40), HEADS, 64, cold_bytes=100_000, device=torch.device("cpu"))


def test_the_same_batches_every_time():
    assert [(batch.name, len(batch.lengths)) for batch in batches()] == [
        ("1 x 512", 1),
        ("8 x 1024", 8),
        ("64 x 200-1600", 64),
        ("256 x 200-1600", 256),
        ("16 x 4096", 16),
        ("1 x 4096", 1),
    ]
    assert batches() == batches()
    assert all(200 <= length <= 1600 for length in batches()[3].lengths)


def test_inputs_hold_what_is_expected_of_them():
    inputs = make(16)
    assert inputs.caches.shape == (10, 2, 5, 16, 2, 16)
    assert inputs.rows.block_tables.shape == (2, 4)
    assert inputs.layer_bytes == 45 * 2 * 2 * 16 * 2
    decode = PlainKernels().start_decode(inputs.rows, [None])
    assert inputs.error(decode(inputs.query, *inputs.caches[0], inputs.how)) <= inputs.allowed
    assert inputs.error(decode(inputs.query, *inputs.caches[1], inputs.how)) > inputs.allowed


@pytest.mark.parametrize("rows", [1, 8, 256])
def test_tunings_are_legal(rows: int):
    found = list(tunings((16, 8, 128), rows))
    assert len(found) == len(set(found))
    assert 20 < len(found) < 250
    assert all(tuning.split_length % tuning.tile == 0 for tuning in found)
    assert {tuning.split_length for tuning in found} <= set(SPLIT_LENGTHS)


def test_a_failing_variant_does_not_stop_the_rest(monkeypatch, capsys):
    def time_variant(variant: Variant, inputs: Inputs) -> float:
        if variant.kind == "flash-attn":
            raise ValueError("no such luck")
        if variant.tuning:
            return variant.tuning.split_length * 1e-6
        return variant.block_size * 1e-6

    monkeypatch.setattr(attention_speed, "time_variant", time_variant)
    table = Table("title", make, deadline=time.monotonic() + 60)
    table.try_all(library_variants())
    table.try_all(triton_variant(tuning, 64) for tuning in tunings(HEADS, 1))
    printed = capsys.readouterr().out
    assert "FAILED flash-attn block=256: ValueError: no such luck" in printed
    triton, fa3 = map(json.loads, table.best_lines(HEADS, Batch("two", (5, 40))))
    assert (triton["kind"], triton["us"], triton["split_length"]) == ("triton", 32.0, 32)
    assert (fa3["kind"], fa3["us"], fa3["num_splits"]) == ("fa3", 16.0, "ours")
    assert table.fastest_tunings()[0].split_length == 32


def test_out_of_time(capsys):
    table = Table("title", make, deadline=0)
    table.try_all(library_variants())
    assert capsys.readouterr().out.count("out of time before") == 1
    assert table.best_lines(HEADS, Batch("two", (5, 40))) == []

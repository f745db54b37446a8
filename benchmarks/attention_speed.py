"""Times decode attention alone: our kernel with many tunings, and the libraries there are.

    python -m benchmarks.attention_speed [--seconds 220] [--capacity 4096]

Each variant is one layer's call in a CUDA graph, its plan made before, over as many layers' caches
in turn as it takes for none of them to be in the L2 cache. A variant's result is compared with
attention in float64 after all its replays; one that fails is named, and the rest go on. Block
tables are as wide as `--capacity` tokens need, whatever the contexts, as they are in the runtime.

Prints a table of µs a call and TB/s of keys and values, then one line of JSON for each model,
batch and kind of kernel: the fastest right variant.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.attention_cases import ALLOWED_RATIO, plain_attention, usual
from worker.attention.base import DecodeRows, LayerAttention
from worker.attention.fa3_splits import decode_splits
from worker.attention.paged import DecodeKernel
from worker.kernels.decode_attention import SplitDecode, start_split_decode
from worker.kernels.decode_tuning import DecodeTuning, choose_tuning

DTYPE = torch.bfloat16
COLD_BYTES = 256 << 20
"""Keys and values read between two calls over the same ones: several times the L2 cache."""
MIN_CALLS = 8
"""Calls in a graph, so that its own launch does not count."""
SAMPLES = 5
SAMPLE_SECONDS = 0.006
MODELS = ((16, 8, 128), (32, 8, 128))
"""Heads, KV heads and head size of Qwen3-0.6B and 8B."""
SHAPES = ((32, 2), (32, 4), (64, 4), (16, 1), (64, 2), (128, 4), (64, 8), (32, 1), (128, 8))
"""(tile, warps) of our kernel, the likeliest first."""
TILES_HELD = (2, 4, 3, 1)
"""Tiles in shared memory at once."""
NUM_TAKEN_OVER = 5
"""Tunings of the first model's that the others try: each takes half a second to compile."""
SPLIT_LENGTHS = (32, 64, 128, 256, 512, 1024)
SHARED_BYTES = 200 << 10
FA3_SPLITS = (0, 1, 2, 4, 8, 16, 32)
"""0 lets the library choose."""


class Batch(NamedTuple):
    """Rows to time."""

    name: str
    lengths: tuple[int, ...]


def batches() -> list[Batch]:
    """Return the batches of docs/performance."""
    draw = random.Random(0)
    mixed = tuple(draw.randint(200, 1600) for _ in range(256))
    return [
        Batch("1 x 512", (512,)),
        Batch("8 x 1024", (1024,) * 8),
        Batch("64 x 200-1600", mixed[:64]),
        Batch("256 x 200-1600", mixed),
        Batch("16 x 4096", (4096,) * 16),
        Batch("1 x 4096", (4096,)),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A batch on the device, in blocks of one size."""

    query: Tensor
    """[rows, 1, heads, head_dim]"""
    caches: Tensor
    """[layers, 2, blocks, block_size, kv_heads, head_dim]"""
    rows: DecodeRows
    expected: Tensor
    """[rows, heads · head_dim] float64, of the first layer"""
    allowed: float
    """How far off a result may be."""
    num_processors: int

    @property
    def how(self) -> LayerAttention:
        """How every layer attends."""
        return usual(self.query.shape[3])

    @property
    def layer_bytes(self) -> int:
        """Keys and values that one call must read."""
        per_token = 2 * self.caches.shape[4] * self.caches.shape[5] * self.caches.itemsize
        return int(self.rows.lengths.sum()) * per_token

    def error(self, output: Tensor) -> float:
        """Return how far off the first layer's result is; NaN is infinitely far."""
        off = (output.reshape(self.expected.shape).double() - self.expected).abs().max()
        return float(off.nan_to_num(float("inf")))


def make_inputs(
    lengths: Sequence[int],
    heads: tuple[int, int, int],
    capacity: int,
    block_size: int,
    *,
    cold_bytes: int,
    device: torch.device,
) -> Inputs:
    """Return random keys and values in scattered blocks, in enough layers to be cold."""
    num_heads, num_kv_heads, head_dim = heads
    held = [-(-length // block_size) for length in lengths]
    num_blocks = sum(held) + 1
    layer_bytes = num_blocks * block_size * 2 * num_kv_heads * head_dim * DTYPE.itemsize
    generator = torch.Generator(device).manual_seed(0)
    sizes = (2, num_blocks, block_size, num_kv_heads, head_dim)
    num_layers = 1 + cold_bytes // layer_bytes
    caches = torch.empty(num_layers, *sizes, dtype=DTYPE, device=device)
    for layer in caches:
        layer.normal_(generator=generator)
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0))
    tables = torch.full((len(lengths), -(-capacity // block_size)), num_blocks - 1)
    ends = itertools.accumulate(held)
    for table, count, end in zip(tables, held, ends, strict=True):
        table[:count] = order[end - count : end]
    query = torch.empty(len(lengths), 1, num_heads, head_dim, dtype=DTYPE, device=device)
    query.normal_(generator=generator)
    rows = DecodeRows(
        cache_positions=torch.zeros(len(lengths), dtype=torch.int64, device=device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=tables.to(device, torch.int32),
    )
    exact, plain = [], []
    for row, length in enumerate(lengths):
        blocks = rows.block_tables[row, : held[row]].long()
        contents = caches[0][:, blocks].flatten(1, 2)[:, :length].transpose(0, 1)
        exact.append(plain_attention(query[row], contents, length - 1, torch.float64))
        plain.append(plain_attention(query[row], contents, length - 1, DTYPE))
    expected = torch.cat(exact)
    num_processors = 1
    if device.type == "cuda":
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Inputs(
        query=query,
        caches=caches,
        rows=rows,
        expected=expected,
        allowed=ALLOWED_RATIO * float((torch.cat(plain).double() - expected).abs().max()),
        num_processors=num_processors,
    )


class Variant(NamedTuple):
    """A kernel and how it is told to go about it."""

    kind: str
    block_size: int
    parameters: Mapping[str, object]
    start: Callable[[Inputs], DecodeKernel]
    tuning: DecodeTuning | None = None
    """Our kernel's."""

    def __str__(self) -> str:
        told = " ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.kind} block={self.block_size} {told}".strip()


def triton_variant(tuning: DecodeTuning, block_size: int) -> Variant:
    """Return our kernel with a tuning."""

    def start(inputs: Inputs) -> DecodeKernel:
        return start_split_decode(
            inputs.rows.lengths,
            inputs.rows.block_tables,
            num_heads=inputs.query.shape[2],
            num_kv_heads=inputs.caches.shape[4],
            head_dim=inputs.query.shape[3],
            block_size=block_size,
            num_processors=inputs.num_processors,
            tuning=tuning,
        )

    return Variant("triton", block_size, asdict(tuning), start, tuning)


def fa3_variant(num_splits: int | None, pack_gqa: bool | None, block_size: int) -> Variant:
    """Return FlashAttention 3 with metadata; None splits are what the runtime would choose."""

    def start(inputs: Inputs) -> DecodeKernel:
        from flash_attn_interface import (  # noqa: PLC0415 - may not be there
            flash_attn_with_kvcache,
            get_scheduler_metadata,
        )

        count, width = inputs.rows.block_tables.shape
        heads, kv_heads = inputs.query.shape[2], inputs.caches.shape[4]
        splits = num_splits
        if splits is None:
            splits = decode_splits(count, kv_heads, width * block_size, inputs.num_processors)
        plan = get_scheduler_metadata(
            batch_size=count,
            max_seqlen_q=1,
            max_seqlen_k=width * block_size,
            num_heads_q=heads,
            num_heads_kv=kv_heads,
            headdim=inputs.query.shape[3],
            cache_seqlens=inputs.rows.lengths,
            qkv_dtype=DTYPE,
            page_size=block_size,
            causal=False,
            num_splits=splits,
            pack_gqa=pack_gqa,
        )

        def decode(
            query: Tensor,
            keys: Tensor,
            values: Tensor,
            how: LayerAttention,
            sinks: Tensor | None = None,
        ) -> Tensor:
            assert how == inputs.how, "the library is called with its own scale"
            assert sinks is None, "no sinks are timed"
            output: Tensor = flash_attn_with_kvcache(
                query,
                keys,
                values,
                cache_seqlens=inputs.rows.lengths,
                page_table=inputs.rows.block_tables,
                causal=False,
                scheduler_metadata=plan,
                num_splits=splits,
                pack_gqa=pack_gqa,
            )
            return output

        return decode

    told = {"num_splits": "ours" if num_splits is None else num_splits, "pack_gqa": pack_gqa}
    return Variant("fa3", block_size, told, start)


def flash_attn_variant(block_size: int) -> Variant:
    """Return FlashAttention 2."""

    def start(inputs: Inputs) -> DecodeKernel:
        from worker.attention.flash_attn import FlashAttnKernels  # noqa: PLC0415

        return FlashAttnKernels().start_decode(inputs.rows, [None])

    return Variant("flash-attn", block_size, {}, start)


def library_variants() -> Iterator[Variant]:
    """Yield what there is to compare with."""
    yield fa3_variant(None, True, 64)
    yield fa3_variant(None, True, 256)
    yield fa3_variant(None, True, 16)
    for num_splits in FA3_SPLITS:
        yield fa3_variant(num_splits, True, 64)
    yield fa3_variant(0, None, 64)
    yield fa3_variant(1, None, 64)
    yield flash_attn_variant(256)


def tunings(heads: tuple[int, int, int], rows: int) -> Iterator[DecodeTuning]:
    """Yield the default tuning and then every other that fits, the likeliest first."""
    default = choose_tuning(rows, heads[1], heads[2], DTYPE)
    yield default
    for held, (tile, warps) in itertools.product(TILES_HELD, SHAPES):
        if held * tile * 2 * heads[2] * DTYPE.itemsize > SHARED_BYTES:
            continue
        for split_length in SPLIT_LENGTHS:
            # Many rows need no short splits, and few no long ones.
            is_sensible = (
                split_length % tile == 0
                and (rows <= 16 or split_length >= 128)
                and (rows > 1 or split_length <= 256)
            )
            tuning = DecodeTuning(
                tile=tile, warps=warps, stages=held + 1, split_length=split_length
            )
            if is_sensible and tuning != default:
                yield tuning


def compile_all(variants: Iterable[Variant], inputs: Inputs) -> None:
    """Compile our kernel both for rows whose splits never grow and for those whose may."""
    layer = inputs.caches[0]
    for variant in variants:
        try:
            kernel = variant.start(inputs)
            assert isinstance(kernel, SplitDecode), "only our kernel is compiled here"
            for num_splits in (1, kernel.num_splits):
                replace(kernel, num_splits=num_splits)(inputs.query, layer[0], layer[1], inputs.how)
        except Exception as error:  # noqa: BLE001 - it will fail again where it is timed
            print(f"{variant} does not compile: {error}"[:200], flush=True)


def time_variant(variant: Variant, inputs: Inputs) -> float:
    """Return seconds a call. Raises ValueError if the result is wrong, or what the library does."""
    kernel = variant.start(inputs)
    layers = [(layer[0], layer[1]) for layer in inputs.caches]
    rounds = -(-MIN_CALLS // len(layers))
    kernel(inputs.query, *layers[0], inputs.how)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [
            kernel(inputs.query, *layer, inputs.how) for _ in range(rounds) for layer in layers
        ]
    graph.replay()
    estimate = _seconds(graph, 1)
    replays = max(1, min(200, round(SAMPLE_SECONDS / estimate)))
    samples = sorted(_seconds(graph, replays) for _ in range(SAMPLES))
    error = max(inputs.error(output) for output in outputs[:: len(layers)])
    if error > inputs.allowed:
        raise ValueError(f"wrong by {error:.2e}, allowed {inputs.allowed:.2e}")
    return samples[SAMPLES // 2] / len(outputs)


def _seconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / replays


class Found(NamedTuple):
    """A right variant and its time."""

    variant: Variant
    seconds: float


class Table:
    """Times what it is given for one model and batch, until its time is up."""

    def __init__(self, title: str, make: Callable[[int], Inputs], *, deadline: float) -> None:
        self._title = title
        self._make = make
        self._deadline = deadline
        self._inputs: dict[int, Inputs] = {}
        self._found: list[Found] = []

    def try_all(self, variants: Iterable[Variant]) -> None:
        """Time variants in turn and print those that fail; of ours, else only the best so far."""
        for variant in variants:
            if time.monotonic() > self._deadline:
                print(f"{self._title:<32} out of time before {variant}", flush=True)
                return
            self._try(variant)

    def fastest_tunings(self) -> list[DecodeTuning]:
        """Return our kernel's, fastest first."""
        ordered = sorted(self._found, key=lambda found: found.seconds)
        return [found.variant.tuning for found in ordered if found.variant.tuning]

    def best_lines(self, heads: tuple[int, int, int], batch: Batch) -> list[str]:
        """Return the fastest of each kind as JSON."""
        lines = []
        for kind in ("triton", "fa3", "flash-attn"):
            if (best := self._best(kind)) is None:
                continue
            line = {
                "heads": heads,
                "batch": batch.name,
                "kind": kind,
                "us": round(best.seconds * 1e6, 2),
                "tb_s": round(self._terabytes(best), 3),
                "block_size": best.variant.block_size,
                **best.variant.parameters,
            }
            lines.append(json.dumps(line))
        return lines

    def _best(self, kind: str) -> Found | None:
        of_kind = (found for found in self._found if found.variant.kind == kind)
        return min(of_kind, key=lambda found: found.seconds, default=None)

    def _terabytes(self, found: Found) -> float:
        """Return TB/s."""
        return self._inputs[found.variant.block_size].layer_bytes / found.seconds / 1e12

    def _try(self, variant: Variant) -> None:
        try:
            if variant.block_size not in self._inputs:
                self._inputs[variant.block_size] = self._make(variant.block_size)
            seconds = time_variant(variant, self._inputs[variant.block_size])
        except Exception as error:  # noqa: BLE001 - one that fails must not stop the rest
            reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:160]
            print(f"{self._title:<32} FAILED {variant}: {reason}", flush=True)
            return
        best = self._best(variant.kind)
        found = Found(variant, seconds)
        self._found.append(found)
        if variant.tuning is None or best is None or seconds < best.seconds:
            print(
                f"{self._title:<32} {seconds * 1e6:8.2f} us {self._terabytes(found):5.2f} TB/s  "
                f"{variant}",
                flush=True,
            )


def run(seconds: float, capacity: int) -> None:
    """Time everything, each model and batch in its share of the time."""
    device = torch.device("cuda", 0)
    end = time.monotonic() + seconds
    cases = list(itertools.product(MODELS, batches()))
    fastest: dict[str, list[DecodeTuning]] = {}
    lines = []
    for index, (heads, batch) in enumerate(cases):
        make = partial(
            make_inputs, batch.lengths, heads, capacity, cold_bytes=COLD_BYTES, device=device
        )
        rows = len(batch.lengths)
        if index == 0:
            unsplit = [
                triton_variant(tuning, 64)
                for tuning in tunings(heads, 16)
                if tuning.split_length == max(SPLIT_LENGTHS)
            ]
            compile_all(unsplit, make(64))
            print(f"compiled, {end - time.monotonic():.0f} s left", flush=True)
        now = time.monotonic()
        share = (end - now) / (len(cases) - index)
        table = Table(f"{heads} {batch.name}", make, deadline=now + share)
        table.try_all(library_variants())
        tried = fastest.get(batch.name)
        if tried is None:
            table.try_all(triton_variant(tuning, 64) for tuning in tunings(heads, rows))
            fastest[batch.name] = table.fastest_tunings()[:NUM_TAKEN_OVER]
        else:
            default = choose_tuning(rows, heads[1], heads[2], DTYPE)
            table.try_all(triton_variant(tuning, 64) for tuning in dict.fromkeys([default, *tried]))
        for tuning in table.fastest_tunings()[:1]:
            table.try_all(triton_variant(tuning, block_size) for block_size in (16, 256))
            table.try_all(iter([triton_variant(replace(tuning, combines_at_once=False), 64)]))
        lines.extend(table.best_lines(heads, batch))
        del table
        torch.cuda.empty_cache()
    print("best of each:", *lines, sep="\n")


def main() -> None:
    """Time what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=220, help="when to stop")
    parser.add_argument("--capacity", type=int, default=4096, help="tokens a block table holds")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("attention_speed needs a GPU, and torch sees none")
    torch.set_grad_enabled(False)
    run(arguments.seconds, arguments.capacity)


if __name__ == "__main__":
    main()

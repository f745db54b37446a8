"""Checks on a GPU that what is fast is also right. Prints a table; exits with 1 if a row fails.

    python -m benchmarks.gpu_check [--model DIR|FILE.gguf] [--back-ends fa3 flash-attn triton torch]

- attention: every back end on random paged batches against attention in float64; it may be at most
  twice as far off as attention written out plainly in its dtype; with windows and sinks too, and
  over a cache in fp8, where it is held to attention over the rounded keys and values
- draw: the sampling kernel against torch's sampler
- tokens: the whole runner in bfloat16 against transformers in float32 over 64 tokens of each of 50
  prompts, pieces of our own pages, with CUDA graphs and without; a token may differ only where the
  reference's first choice is at most 0.25 above its second (logits). Beside it how far transformers
  gets in bfloat16, and what rounding the weights alone does: its float32 tokens with and without
- graphs: a replayed decode step against the same step run eagerly, bit for bit

Without --model it is the bundled one.
"""

import argparse
import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from benchmarks.attention_cases import Errors, Shape, largest_errors, random_case
from benchmarks.environment import ROOT
from benchmarks.teacher_forcing import (
    Comparison,
    Reference,
    compare,
    compare_model,
    make_references,
    text_prompts,
)
from protocol.errors import ConfigError
from protocol.lifecycle import ProcessConfig
from protocol.messages import SamplingParams
from worker.attention.choice import AttentionChoice, build_attention
from worker.attention.paged import PagedAttention
from worker.batch import SampledRows
from worker.config import WorkerConfig
from worker.decode_graphs import DecodeGraph, DecodeGraphs
from worker.decode_inputs import DecodeInputs
from worker.find_model import find_model
from worker.graph_store import GraphStore
from worker.kv_cache import KVCache, KVCacheShape
from worker.kv_rounding import E4M3
from worker.logit_edits import Known
from worker.model_files import is_gguf, read_model_config
from worker.model_loading import load_model
from worker.model_setup import build_model_runner, layer_attentions
from worker.parallel import OneRank
from worker.sampler import sample
from worker.sampling_slots import SamplingSlots, Variant
from worker.slot_sampler import FAILED
from worker.slot_tables import SlotTables

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALLOWED_GAP = 0.25
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_PROMPTS, NUM_TOKENS = 50, 64
PROMPT_LENGTHS = (7, 60, 137, 267, 397)
SHAPES = (
    (16, 8, 128),  # Qwen3-0.6B
    (32, 8, 128),  # Qwen3-8B
    (9, 3, 64),  # SmolLM2
)
WINDOWED_SHAPES = (
    (64, 8, 64),  # GPT-OSS
    (8, 4, 256),  # Gemma 3
)
LARGEST_FLASH_ATTN_HEAD = 192
"""Of a build for one kind of GPU, which may leave the largest heads out."""
WINDOWS = (None, 1, 128, 512, 1000)
MAX_LEN = 1500
BACK_ENDS = ("fa3", "flash-attn", "triton", "torch")
BLOCK_SIZES = (16, 64, 256)
ROW_COUNTS = (1, 2, 7, 8, 9, 31, 33, 255, 256)
"""Decode rows on both sides of the graphs' sizes, each with padding rows behind it."""


class Outcome(NamedTuple):
    """What a check found, in words."""

    is_right: bool
    detail: str


class Table:
    """The rows so far; each is printed as it comes."""

    def __init__(self) -> None:
        self.num_wrong = 0

    def add(self, name: str, check: Callable[[], Outcome]) -> None:
        """Run a check and print its row. An exception is a row that fails."""
        started = time.perf_counter()
        try:
            outcome = check()
        except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
            outcome = Outcome(False, f"{type(error).__name__}: {error}".replace("\n", " ")[:600])
        self.num_wrong += not outcome.is_right
        seconds = time.perf_counter() - started
        verdict = "ok   " if outcome.is_right else "WRONG"
        print(f"{verdict} {name:<44} {seconds:6.1f} s  {outcome.detail}", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def check_attention(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    as_graph: bool,
    windows: Sequence[int | None] = (None,),
    has_sinks: bool = False,
    is_fp8: bool = False,
) -> Outcome:
    """Run random cases, as they are or as graphs have them."""
    errors = []
    row_counts = [(5, 4), (0, 3), (9, 0), (33, 2), (1, 0)]
    if len(windows) > 1 or is_fp8:
        row_counts.append((300, 0))  # so many that a library decodes them itself
    for seed, (num_decode, num_chunks) in enumerate(row_counts):
        case = random_case(
            shape,
            num_decode=num_decode,
            num_chunks=num_chunks,
            max_len=MAX_LEN,
            seed=seed,
            windows=windows,
            has_sinks=has_sinks,
        )
        errors.append(
            largest_errors(case, name, dtype=dtype, device=device, as_graph=as_graph, is_fp8=is_fp8)
        )
    return _outcome(errors)


def check_row_counts(name: str, shape: Shape, device: torch.device) -> Outcome:
    """Run decode rows as graphs have them, of every row count that may matter."""
    errors = []
    for count in ROW_COUNTS:
        case = random_case(shape, num_decode=count, num_chunks=0, max_len=MAX_LEN // 2, seed=count)
        errors.append(
            largest_errors(case, name, dtype=torch.bfloat16, device=device, as_graph=True)
        )
    return _outcome(errors)


def _outcome(errors: Sequence[Errors]) -> Outcome:
    worst = max(errors, key=lambda case: case.found - case.allowed)
    return Outcome(
        all(case.is_within for case in errors),
        f"worst of {len(errors)} cases: error {worst.found:.2e}, allowed {worst.allowed:.2e}",
    )


def check_draw(device: torch.device, vocab_size: int, variant: Variant) -> Outcome:
    """Draw tokens by the kernels and by torch."""
    from worker.cuda_sampler import CudaSampler  # noqa: PLC0415 - needs Triton

    slots = np.arange(64, dtype=np.int32)
    sampling = _sampling(len(slots), vocab_size, device, variant)
    indices = torch.from_numpy(slots * 977).long().to(device)
    rows = sampling.rows(slots, indices)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(len(slots), vocab_size, device=device, generator=generator) * 3
    logits = logits.to(torch.bfloat16)
    logits[5, 7] = float("nan")
    logits[6, 8] = float("inf")
    raw = logits.float()
    index = torch.from_numpy(slots).long().to(device)
    edited = raw.clone()
    if len(picked := torch.from_numpy(sampling.edits.rows_of(slots)).to(device)):
        edited[picked] = sampling.edits.edit(raw[picked], index[picked], indices[picked])
    expected = sample(edited, rows)
    sampled = SampledRows(slots=index, indices=indices, host_slots=slots)
    drawn = CudaSampler(sampling, vocab_size, OneRank()).sample(logits, sampled)
    failed = drawn == FAILED
    kept = torch.equal(sampling.last_tokens[~failed], drawn[~failed].long())
    differing = int((expected.tokens != drawn)[~expected.failed].sum())
    return Outcome(
        torch.equal(expected.failed, failed) and kept and differing == 0,
        f"{differing} of {len(slots)} tokens differ, {int(failed.sum())} rows failed",
    )


def check_tokens(
    model: Path, name: str, references: Sequence[Reference], dtype: str, *, eager: bool
) -> Outcome:
    """Run the whole runner beside the reference."""
    config = WorkerConfig(
        process=ProcessConfig(run_dir="unused"),
        model=str(model),
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=dtype,
        attention=name,
        max_model_len=1024,
        max_num_seqs=NUM_PROMPTS,
        num_blocks=NUM_PROMPTS * (64 if name == "torch" else 16),
        enforce_eager=eager,
    )
    found = compare(build_model_runner(config), references, max_chunk=200)
    return Outcome(
        found.worst_gap <= ALLOWED_GAP and found.worst_choice <= 2 * ALLOWED_GAP,
        f"{_tell(found)}, allowed {ALLOWED_GAP} and {2 * ALLOWED_GAP}",
    )


def _tell(found: Comparison) -> str:
    return (
        f"{found.differing} of {found.positions} tokens differ, where the first choice is at most "
        f"{found.worst_gap:.3f} above the second, {found.worst_choice:.3f} above the token"
    )


def check_graphs(
    model: Path, name: str, device: torch.device, variant: Variant, *, is_fp8: bool = False
) -> Outcome:
    """Replay every bucket and run it eagerly, from the same state."""
    from worker.cuda_sampler import CudaSampler  # noqa: PLC0415 - needs Triton

    buckets, slots, max_blocks = (1, 2, 8, 24), 24, 6
    config = read_model_config(model)
    dtype = torch.bfloat16
    choice = AttentionChoice(name=name, reason="")
    shape = KVCacheShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=choice.block_size(None),
    )
    max_len = max_blocks * shape.block_size
    loaded, _ = load_model(
        model, config, group=OneRank(), max_model_len=max_len, dtype=dtype, device=device
    )
    num_blocks = slots * max_blocks
    kv_dtype = E4M3 if is_fp8 else dtype
    cache = KVCache(shape, num_blocks, dtype=kv_dtype, device=device, layout=choice.layout)
    attention = build_attention(name, cache, config.num_heads, layer_attentions(config), dtype)
    assert isinstance(attention, PagedAttention), "only paged back ends can be captured"
    sampling = _sampling(slots + 1, config.vocab_size, device, variant)
    edits = sampling.edits.tensors.all()
    last_tokens = sampling.last_tokens
    state = SlotTables(
        last_tokens,
        max_blocks=max_blocks,
        block_size=shape.block_size,
        pad_block=cache.pad_block,
    )
    graphs = DecodeGraphs(
        loaded,
        attention,
        DecodeInputs(state, max_rows=slots),
        CudaSampler(sampling, config.vocab_size, OneRank()).draw,
        GraphStore(max_rows=slots, device=device),
        buckets=buckets,
    )
    with torch.inference_mode():
        graphs.capture()
        for bucket in buckets:
            # But for plain ones, the first replay captures, which changes the padding slot.
            rows = np.arange(bucket, dtype=np.int32)
            graphs.replay(bucket, rows, np.zeros_like(rows), variant)
    contents = torch.randn(cache.data.shape, dtype=dtype, device=device).to(kv_dtype)
    tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    tables = tables.reshape(slots, max_blocks)
    state.set_blocks([(slot, 0, tables[slot]) for slot in range(slots)])
    wrong = []
    for num_rows in (1, 2, 5, 8, 13, 24):
        bucket = min(size for size in buckets if size >= num_rows)
        random = np.random.default_rng(num_rows)
        used = random.permutation(slots)[:num_rows].astype(np.int32)
        positions = random.integers(0, max_len, num_rows).astype(np.int32)
        states = []
        edits_before = [tensor.clone() for tensor in edits]
        for replays in (True, False):
            cache.data.copy_(contents)
            last_tokens.copy_(torch.arange(slots + 1, device=device) * 31)
            torch._foreach_copy_(edits, edits_before)
            # Replayed either way: it is what fills the inputs.
            with torch.inference_mode():
                replay = graphs.replay(bucket, used, positions, variant)
            if not replays:
                cache.data.copy_(contents)
                last_tokens.copy_(torch.arange(slots + 1, device=device) * 31)
                torch._foreach_copy_(edits, edits_before)
                replay.reported.fill_(-7)
                with torch.inference_mode():
                    graphs.run_eagerly(DecodeGraph(bucket, variant))
            left = (replay.reported, last_tokens, replay.hidden, *edits)
            states.append([tensor.clone() for tensor in left])
        if not all(torch.equal(a, b) for a, b in zip(*states, strict=True)):
            off = (states[0][2].float() - states[1][2].float()).abs().max()
            wrong.append(f"{num_rows} rows (hidden off by {float(off):.2e})")
        if not states[0][2].isfinite().all() or (states[0][0] < 0).any():
            wrong.append(f"{num_rows} rows not finite")
    return Outcome(not wrong, "; ".join(wrong) or "6 row counts, bit for bit")


def _sampling(
    slots: int, vocab_size: int, device: torch.device, variant: Variant = Variant.PLAIN
) -> SamplingSlots:
    """Return slots of which every third is greedy and, as the variant has it, half have filters,
    and two thirds edited logits."""
    sampling = SamplingSlots(slots, vocab_size, device)
    filters: tuple[dict[str, float], ...] = ({},)
    if variant >= Variant.FILTERED:
        filters = ({}, {"top_k": 40}, {"top_p": 0.9}, {}, {"min_p": 0.05, "top_k": 7}, {})
    params = [
        SamplingParams(
            temperature=0.0 if slot % 3 == 0 else 0.6 + 0.1 * (slot % 5),
            seed=slot * 0x123456789ABCDE,
            **filters[slot % len(filters)],  # type: ignore[arg-type]  # top_k is an int here
        )
        for slot in range(slots)
    ]
    sampling.join(range(slots), params)
    if variant is Variant.EDITED:
        tokens = np.random.default_rng(0).integers(0, vocab_size, (slots, 400)).astype(np.int32)
        sampling.edits.join(
            Known(
                slot=slot,
                params=SamplingParams(
                    presence_penalty=0.5,
                    frequency_penalty=0.7,
                    repetition_penalty=1.0 + 0.1 * (slot % 7),
                    logit_bias={slot: 3.0, 7: -100.0},
                    bad_word_ids=[[11], [*tokens[slot, -2:].tolist(), 12]],
                    min_tokens=slot,
                    stop_token_ids=[2, 5],
                ),
                token_ids=tokens[slot],
                prompt_len=200,
            )
            for slot in range(slots)
            if slot % 3 and slot < slots - 1
        )
    return sampling


def load_reference(model: Path, device: torch.device, dtype: torch.dtype) -> "PreTrainedModel":
    """Return transformers' model."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if is_gguf(model):
            loaded = AutoModelForCausalLM.from_pretrained(
                model.parent, gguf_file=model.name, dtype=dtype
            )
        else:
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    return loaded.to(device).eval()


def references_of(model: Path, device: torch.device, weights: torch.dtype) -> list[Reference]:
    """Return what transformers makes of the prompts, in float32.

    The weights are rounded to what an engine of that dtype holds, so that a difference is the
    engine's arithmetic, not its checkpoint's.
    """
    loaded = load_reference(model, device, torch.float32)
    for parameter in loaded.parameters():
        parameter.copy_(parameter.to(weights))
    return make_references(loaded, prompts_for(model), num_tokens=NUM_TOKENS)


def prompts_for(model: Path) -> list[list[int]]:
    """Return pieces of our own pages as the model's tokens."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    if is_gguf(model):
        tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    else:
        tokenizer = AutoTokenizer.from_pretrained(model)
    pages = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    tokens: list[int] = tokenizer("\n\n".join(pages), add_special_tokens=False)["input_ids"]
    return text_prompts(tokens, PROMPT_LENGTHS, num_each=NUM_PROMPTS // len(PROMPT_LENGTHS))


def check_reference(
    model: Path, device: torch.device, dtype: torch.dtype, references: Sequence[Reference]
) -> Outcome:
    """Say how far transformers itself gets in a dtype. Never wrong: it is to compare with."""
    found = compare_model(load_reference(model, device, dtype), references)
    return Outcome(True, _tell(found))


def run(model: str, back_ends: Sequence[str], device: torch.device) -> int:
    """Run every check and return how many were wrong."""
    table = Table()
    for name in back_ends:
        for heads in SHAPES:
            blocks = AttentionChoice(name=name, reason="").block_size(None)
            shape = Shape.of(heads, blocks)
            for dtype in (torch.bfloat16, torch.float32 if name == "torch" else torch.float16):
                for as_graph in (False,) if name == "torch" else (False, True):
                    table.add(
                        f"attention {name} {heads} {str(dtype)[6:]}{' graph' * as_graph}",
                        partial(check_attention, name, shape, dtype, device, as_graph=as_graph),
                    )
        if name != "flash-attn":
            _add_fp8(table, name, device)
        _add_windows(table, name, device)
        _add_block_sizes(table, name, device)
    for vocab_size in (151_936, 49_152, 1003):
        for variant in Variant:
            table.add(
                f"draw {vocab_size} {variant.name.lower()}",
                partial(check_draw, device, vocab_size, variant),
            )
    path = Path(find_model(model)[0])
    references: dict[str, list[Reference]] = {}

    def load(weights: str) -> Outcome:
        references[weights] = references_of(path, device, DTYPES[weights])
        return Outcome(True, f"{len(references[weights])} prompts, computed in float32")

    for flag in DTYPES:
        table.add(f"reference of {flag} weights", partial(load, flag))
    for flag, computed_in in DTYPES.items():
        table.add(
            f"tokens transformers {flag}",
            partial(check_reference, path, device, computed_in, references["bfloat16"]),
        )
    for name in back_ends:
        if name != "torch":
            for variant in Variant:
                table.add(
                    f"graphs {name} {variant.name.lower()}",
                    partial(check_graphs, path, name, device, variant),
                )
            if name != "flash-attn":
                table.add(
                    f"graphs {name} cache in fp8",
                    partial(check_graphs, path, name, device, Variant.PLAIN, is_fp8=True),
                )
    for name in back_ends:
        for eager in (True,) if name == "torch" else (True, False):
            flag = "float32" if name == "torch" else "bfloat16"
            table.add(
                f"tokens {name} {flag} {'eager' if eager else 'graphs'}",
                partial(check_tokens, path, name, references[flag], flag, eager=eager),
            )
    return table.num_wrong


def _add_fp8(table: Table, name: str, device: torch.device) -> None:
    """Check a cache in fp8, also with windows and sinks, and more rows than ours decodes."""
    choice = AttentionChoice(name=name, reason="")
    for heads in (*SHAPES, *WINDOWED_SHAPES):
        shape = Shape.of(heads, choice.block_size(None))
        is_windowed = heads in WINDOWED_SHAPES
        for as_graph in (False, True) if choice.is_graphable else (False,):
            table.add(
                f"attention {name} {heads} cache in fp8{' graph' * as_graph}",
                partial(
                    check_attention,
                    name,
                    shape,
                    torch.bfloat16,
                    device,
                    as_graph=as_graph,
                    windows=WINDOWS if is_windowed else (None,),
                    has_sinks=is_windowed,
                    is_fp8=True,
                ),
            )


def _add_windows(table: Table, name: str, device: torch.device) -> None:
    """Check layers of several windows, with sinks and without."""
    choice = AttentionChoice(name=name, reason="")
    for heads in WINDOWED_SHAPES:
        if name == "flash-attn" and heads[2] > LARGEST_FLASH_ATTN_HEAD:
            continue
        shape = Shape.of(heads, choice.block_size(None))
        for has_sinks in (False, True):
            for as_graph in (False, True) if choice.is_graphable else (False,):
                table.add(
                    f"attention {name} {heads} windows{' sinks' * has_sinks}{' graph' * as_graph}",
                    partial(
                        check_attention,
                        name,
                        shape,
                        torch.bfloat16,
                        device,
                        as_graph=as_graph,
                        windows=WINDOWS,
                        has_sinks=has_sinks,
                    ),
                )


def _add_block_sizes(table: Table, name: str, device: torch.device) -> None:
    """Check every block size that a back end can read."""
    choice = AttentionChoice(name=name, reason="")
    heads = SHAPES[0]
    for block_size in BLOCK_SIZES:
        with contextlib.suppress(ConfigError):
            shape = Shape.of(heads, choice.block_size(block_size))
            row = f"attention {name} {heads} block {block_size}"
            table.add(
                row, partial(check_attention, name, shape, torch.bfloat16, device, as_graph=False)
            )
            if choice.is_graphable:
                table.add(f"{row} row counts", partial(check_row_counts, name, shape, device))


def main() -> None:
    """Check, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--model", default="", help="directory or GGUF file; default: a random one")
    parser.add_argument(
        "--back-ends",
        nargs="+",
        choices=BACK_ENDS,
        default=list(BACK_ENDS),
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_check needs a GPU, and torch sees none")
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    wrong = run(arguments.model, arguments.back_ends, torch.device("cuda", 0))
    print(f"{wrong} wrong" if wrong else "all right")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()

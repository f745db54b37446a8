"""What a model makes of a fixed text, here and in transformers: its perplexity, and how far off.

    python -m benchmarks.perplexity [--model M] [--dtype D …] [--quantization Q …]
        [--kv-cache-dtype K …] [--reference]

The text (`benchmarks/texts`) is the language reference of Python, cut into chunks of 2,048 tokens
that know nothing of each other; every token of a chunk but its first is predicted. Ours are the
loaded model, its attention back end and a paged cache, a chunk a step as in serving; transformers
computes the same chunks in float32. Prints one JSON row for each.

Every dtype is run with every quantisation and every dtype of the KV cache. With `--reference` a row
of ours says how much its perplexity differs (`change`, relative), and the mean of |difference| of
the tokens' log-probabilities, in which nothing cancels out.
"""

import argparse
import itertools
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor

from benchmarks.environment import ROOT, commit, cpu_name, today
from benchmarks.flags import whole
from benchmarks.rows import report
from protocol.columns import pack_int32
from protocol.messages import Join, SamplingParams, StepPlan
from worker.attention.choice import build_attention, choose_attention
from worker.batch import BatchBuilder
from worker.config import KV_CACHE_DTYPES, QUANTIZATIONS
from worker.find_model import find_model
from worker.kv_cache import KVCache, KVCacheShape
from worker.kv_rounding import kv_cache_dtype
from worker.layers.linear import fewest_rows
from worker.model_files import is_gguf, read_model_config
from worker.model_loading import load_model
from worker.model_setup import DTYPES, layer_attentions
from worker.parallel import OneRank
from worker.quantization import Storage, check_storage, choose_storage
from worker.slots import SlotTable

TEXT = ROOT / "benchmarks" / "texts" / "python_reference.txt"
RESULTS = ROOT / "benchmarks" / "results" / "perplexity.jsonl"
CHUNK = 2048
_LOGIT_ROWS = 256
"""Rows that are scored at once: all of a chunk's logits would be gigabytes."""


class Scores(NamedTuple):
    """What came out, and in how many seconds."""

    logprobs: Tensor
    """[predicted tokens] float64, computed in float32"""
    seconds: float

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-probability."""
        return math.exp(-float(self.logprobs.mean()))


def main() -> None:
    """Print one JSON line for ours, and one for transformers."""
    arguments = parse_arguments()
    model = Path(find_model(arguments.model)[0])
    device = torch.device(arguments.device)
    tokens = text_tokens(model)[: arguments.tokens]
    common = {"model": model.stem, "tokens": len(tokens)}
    place = {
        "device": cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(),
        "commit": commit(),
        "date": today(),
    }
    keep_in = RESULTS if arguments.save else None
    reference = None
    if arguments.reference:
        reference = transformers_scores(model, tokens, device)
        names = {"engine": "transformers", "dtype": "float32", "quantization": "none"}
        report(common | names | figures(reference) | place, keep_in)
    config = read_model_config(model)
    for dtype in arguments.dtype or [config.dtype]:
        for flag, cache in itertools.product(arguments.quantization, arguments.kv_cache_dtype):
            storage = choose_storage(flag, config.quantization)
            ours = our_scores(model, tokens, DTYPES[dtype], device, storage, flag, cache)
            row = figures(ours)
            if reference is not None:
                row["change"] = round(ours.perplexity / reference.perplexity - 1, 6)
                difference = (ours.logprobs - reference.logprobs).abs().mean()
                row["logprob_difference"] = float(f"{float(difference):.3g}")
            names = {"engine": "tokenwire", "dtype": dtype, "quantization": storage}
            if cache != "auto":
                names["kv_cache_dtype"] = cache
            report(common | names | row | place, keep_in)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--model", default="", help="directory, Hub id or GGUF file")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: the checkpoint's")
    parser.add_argument("--quantization", nargs="+", choices=QUANTIZATIONS, default=["auto"])
    parser.add_argument("--kv-cache-dtype", nargs="+", choices=KV_CACHE_DTYPES, default=["auto"])
    parser.add_argument("--tokens", type=whole(2), default=20_000, help="of the text, at most")
    parser.add_argument("--reference", action="store_true", help="transformers too, in float32")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--save", action="store_true", help=f"append to {RESULTS.relative_to(ROOT)}"
    )
    return parser.parse_args()


def figures(scores: Scores) -> dict[str, object]:
    """Return a row's numbers."""
    return {"perplexity": round(scores.perplexity, 5), "s": round(scores.seconds, 1)}


def text_tokens(model: Path) -> list[int]:
    """Return the text as the model's tokens."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    if is_gguf(model):
        tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    else:
        tokenizer = AutoTokenizer.from_pretrained(model)
    tokens: list[int] = tokenizer(TEXT.read_text(), add_special_tokens=False)["input_ids"]
    return tokens


def chunks_of(tokens: Sequence[int]) -> list[list[int]]:
    """Cut tokens into chunks of which each predicts at least one."""
    chunks = [[*tokens[start : start + CHUNK]] for start in range(0, len(tokens), CHUNK)]
    return [chunk for chunk in chunks if len(chunk) > 1]


@torch.inference_mode()
def our_scores(
    path: Path,
    tokens: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    storage: Storage,
    flag: str = "auto",
    cache_flag: str = "auto",
) -> Scores:
    """Return the log-probabilities that Tokenwire's model gives.

    `flag` is that of `--quantization`, `cache_flag` that of `--kv-cache-dtype`.
    """
    config = read_model_config(path)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    check_storage(
        storage, capability=capability, dtype=str(dtype).removeprefix("torch."), flag=flag
    )
    model, _ = load_model(
        path,
        config,
        group=OneRank(),
        max_model_len=CHUNK,
        dtype=dtype,
        device=device,
        storage=storage,
    )
    choice = choose_attention(
        "auto",
        capability=capability,
        dtype=dtype,
        head_dim=config.head_dim,
        is_fp8=cache_flag == "fp8",
    )
    shape = KVCacheShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=choice.block_size(None),
    )
    num_blocks = -(-CHUNK // shape.block_size)
    cache = KVCache(
        shape,
        num_blocks,
        dtype=kv_cache_dtype(cache_flag, dtype),
        device=device,
        layout=choice.layout,
    )
    attention = build_attention(
        choice.name, cache, config.num_heads, layer_attentions(config), dtype
    )
    table = SlotTable(
        slots=1,
        num_blocks=num_blocks,
        block_size=shape.block_size,
        max_model_len=CHUNK,
        vocab_size=config.vocab_size,
    )
    builder = BatchBuilder(
        block_size=shape.block_size,
        pad_block=cache.pad_block,
        min_rows=fewest_rows(device, dtype),
        device=device,
    )
    last_tokens = torch.zeros(1, dtype=torch.int64, device=device)
    logprobs = []
    started = time.monotonic()
    for number, chunk in enumerate(chunks_of(tokens)):
        rows = table.apply(_plan(number, chunk, num_blocks))
        batch = builder.build(rows, table.block_tables, last_tokens)
        hidden = model(batch.tokens, batch.positions, attention.start_step(batch))
        targets = torch.tensor(chunk[1:], device=device)
        for start in range(0, len(targets), _LOGIT_ROWS):
            wanted = targets[start : start + _LOGIT_ROWS]
            logits = model.logits(hidden[start : start + len(wanted)])
            logprobs.append(_logprobs(logits, wanted))
    return Scores(torch.cat(logprobs), time.monotonic() - started)


def _plan(number: int, chunk: Sequence[int], num_blocks: int) -> StepPlan:
    """Return a plan that computes a sequence of one chunk, in place of the one before."""
    join = Join(
        slot=0,
        generation=number,
        token_ids=pack_int32(chunk),
        prompt_len=len(chunk),
        params=SamplingParams(temperature=0.0, seed=0, max_tokens=1),
        block_table=pack_int32(np.arange(num_blocks).tolist()),
    )
    return StepPlan(
        step_id=number + 1,
        leaves=pack_int32([0] if number else []),
        joins=[join],
        copies=b"",
        new_blocks=b"",
        decode=b"",
        chunks=pack_int32([0, 0, len(chunk), 1]),
    )


@torch.inference_mode()
def transformers_scores(path: Path, tokens: Sequence[int], device: torch.device) -> Scores:
    """Return the log-probabilities that transformers gives in float32."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where, file = (path.parent, path.name) if is_gguf(path) else (path, None)
        loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32)
    model = loaded.to(device).eval()
    logprobs = []
    started = time.monotonic()
    for chunk in chunks_of(tokens):
        ids = torch.tensor(chunk, device=device)
        hidden = model.model(ids[None]).last_hidden_state[0]
        for start in range(0, len(chunk) - 1, _LOGIT_ROWS):
            wanted = ids[start + 1 : start + 1 + _LOGIT_ROWS]
            logits = model.lm_head(hidden[start : start + len(wanted)])
            logprobs.append(_logprobs(logits, wanted))
    return Scores(torch.cat(logprobs), time.monotonic() - started)


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each row's token, float64 on the host."""
    return -F.cross_entropy(logits.float(), tokens, reduction="none").double().cpu()


if __name__ == "__main__":
    main()

"""Checks that ranks change nothing: greedy tokens of tiny float32 models at TP 1 and more.

    python -m benchmarks.tp_check [--tp N …] [--device cuda|cpu]

Runs the real processes with random weights, which are the same for any number of ranks. Exits with
1 if a token differs.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from frontend import LLM, SamplingParams

VOCABULARY = 1003
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "dtype": "float32",
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}
NUM_OUTPUT_TOKENS = 48


def main() -> None:
    """Print a line per model and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--tp", type=int, nargs="+", default=[2])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    wrong = 0
    for name, architecture in MODELS.items():
        with tempfile.TemporaryDirectory(prefix="tokenwire-tp-") as directory:
            (Path(directory) / "config.json").write_text(json.dumps(SIZES | architecture))
            expected = generate(directory, tp=1, device=arguments.device)
            for tp in arguments.tp:
                found = generate(directory, tp=tp, device=arguments.device)
                differ = sum(a != b for a, b in zip(expected, found, strict=True))
                wrong += differ
                print(f"{name} tp={tp} answers={len(found)} that differ from tp=1: {differ}")
    raise SystemExit(wrong > 0)


def generate(directory: str, *, tp: int, device: str) -> list[list[int]]:
    """Return greedy answers to 16 prompts, enough blocks for half of them at once."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(5, 120))] for _ in range(16)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    with LLM(
        directory,
        tp=tp,
        device="cuda" if device == "cuda" else "cpu",
        dtype="float32",
        load_format="dummy",
        block_size=16,
        num_blocks=80,
    ) as llm:
        return [list(each.token_ids) for each in llm.generate(prompts, params, progress=False)]


if __name__ == "__main__":
    main()

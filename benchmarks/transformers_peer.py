"""The peer of `benchmarks.cpu`: reads batches as lines of JSON, answers with token ids."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationMixin

from worker.find_model import bundled_model


def main(dtype: str) -> None:
    """Serve batches until standard input ends."""
    path = Path(bundled_model())
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=getattr(torch, dtype)
    ).eval()
    # No token ends an answer, and none is forbidden, as a minimum length would forbid the end.
    model.generation_config.eos_token_id = None
    for line in sys.stdin:
        answer = generate(model, json.loads(line))
        print(json.dumps(answer), flush=True)


@torch.inference_mode()
def generate(model: GenerationMixin, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    """Generate greedily for one left-padded batch; each row is cut to its own length."""
    width = max(len(prompt) for prompt, _ in requests)
    ids = torch.zeros(len(requests), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(requests):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    longest = max(length for _, length in requests)
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=longest,
        pad_token_id=0,
    )
    return [
        row[width : width + length].tolist() for row, (_, length) in zip(out, requests, strict=True)
    ]


if __name__ == "__main__":
    main(sys.argv[1])

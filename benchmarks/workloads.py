"""The offline workloads: token ids in, output lengths fixed, EOS ignored."""

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

MAX_MODEL_LEN = 4096
TEMPERATURE = 0.6
_NUM_IDS = 10_000
_WARM_UP_SEED = 1


class Request(NamedTuple):
    """One request of a workload."""

    prompt: list[int]
    num_output_tokens: int


def nano() -> list[Request]:
    """Return 256 requests of 100 to 1,024 tokens in and 100 to 1,024 out."""
    random.seed(0)
    prompts = [
        [random.randint(0, _NUM_IDS) for _ in range(random.randint(100, 1024))] for _ in range(256)
    ]
    return [Request(prompt, random.randint(100, 1024)) for prompt in prompts]


def bs1() -> list[Request]:
    """Return one request, 128 tokens in and 512 out."""
    return _equal(1, 128, 512)


def bs8() -> list[Request]:
    """Return eight requests, 128 tokens in and 512 out."""
    return _equal(8, 128, 512)


def prefill() -> list[Request]:
    """Return 64 prompts of 2,048 tokens, each with one token out."""
    return _equal(64, 2048, 1)


def warm_up() -> list[Request]:
    """Return 64 requests, 300 tokens in and 32 out, that share no prompt with a workload."""
    return _equal(64, 300, 32, seed=_WARM_UP_SEED)


def _equal(count: int, num_in: int, num_out: int, *, seed: int = 0) -> list[Request]:
    random.seed(seed)
    prompts = [[random.randint(0, _NUM_IDS) for _ in range(num_in)] for _ in range(count)]
    return [Request(prompt, num_out) for prompt in prompts]


WORKLOADS: Mapping[str, Callable[[], list[Request]]] = {
    "nano": nano,
    "bs1": bs1,
    "bs8": bs8,
    "prefill": prefill,
}

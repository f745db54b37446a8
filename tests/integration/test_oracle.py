"""Random requests through all real processes, each answer equal to what its own context hashes to.

The ranks are checksum runners: the next token is a hash of the whole context read back through the
paged cache. So whatever is lost, stale, foreign, repeated or out of order on the way shows.
"""

import http.client
import json
import random
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from worker.checksum import checksum_token

VOCABULARY = 49_152  # the bundled model's, whose tokenizer the frontend uses


@dataclass
class Ask:
    """One request and what must come of it."""

    prompt: list[int]
    max_tokens: int
    seed: int
    temperature: float
    stop_token: int | None
    stream: bool
    abort_after: int | None


def expected(ask: Ask) -> list[int]:
    """Return the output tokens, from the prompt and the parameters alone."""
    context, output = list(ask.prompt), []
    for _ in range(ask.max_tokens):
        token = checksum_token(context, ask.seed, ask.temperature, VOCABULARY)
        context.append(token)
        output.append(token)
        if token == ask.stop_token:
            break
    return output


def draw(rng: random.Random, prefixes: list[list[int]]) -> Ask:
    prompt = list(rng.choice(prefixes)[: rng.randint(0, 64)])
    prompt += [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 24))]
    ask = Ask(
        prompt=prompt,
        max_tokens=rng.randint(1, 60),
        seed=rng.getrandbits(63),
        temperature=rng.choice([0.0, 1.0]),
        stop_token=None,
        stream=rng.random() < 0.5,
        abort_after=rng.randint(1, 5) if rng.random() < 0.2 else None,
    )
    if rng.random() < 0.3:
        ask.stop_token = rng.choice(expected(ask))
    return ask


def answer(engine, ask: Ask) -> list[int]:
    """Send one request and return its output tokens, all or (aborted) the first ones."""
    body = {
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "seed": ask.seed,
        "temperature": ask.temperature,
        "stop_token_ids": [] if ask.stop_token is None else [ask.stop_token],
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": ask.stream or ask.abort_after is not None,
    }
    if not body["stream"]:
        return engine.complete(**body)["choices"][0]["token_ids"]
    tokens: list[int] = []
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(engine.url).netloc, timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    for line in connection.getresponse():
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            break
        if data and not data.startswith(":"):
            for choice in json.loads(data)["choices"]:
                tokens += choice.get("token_ids") or []
        if ask.abort_after is not None and len(tokens) >= ask.abort_after:
            break
    connection.close()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_in_flight", "flags"),
    [
        (1, []),
        (2, ["--itl-target-ms", "2"]),
        (2, ["--max-num-batched-tokens", "32", "--policy", "throughput"]),
        (2, ["--tp", "2", "--no-prefix-cache"]),
        (2, ["--swap-space", "0.001"]),
    ],
)
def test_every_answer_is_its_own_contexts(launch, max_in_flight, flags):
    # 16 requests of up to 148 tokens want up to 600 blocks of 4; there are 80, so they preempt.
    engine = launch(
        *("--fake-workers", "--block-size", "4", "--num-blocks", "80"),
        *("--max-in-flight", str(max_in_flight), *flags),
    )
    rng = random.Random(max_in_flight)
    prefixes = [[rng.randrange(3, VOCABULARY) for _ in range(64)] for _ in range(4)]
    asks = [draw(rng, prefixes) for _ in range(150)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda ask: answer(engine, ask), asks))
    for ask, tokens in zip(asks, answers, strict=True):
        right = expected(ask)
        if ask.abort_after is not None:
            assert len(tokens) >= min(ask.abort_after, len(right))
            right = right[: len(tokens)]
        assert tokens == right


def test_a_block_reused_after_eviction_is_not_found_by_its_old_content(launch):
    engine = launch("--fake-workers", "--block-size", "4", "--num-blocks", "16")
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(40)] for _ in range(6)]
    for prompt in [*prompts, *prompts]:
        ask = Ask(
            prompt, 8, seed=0, temperature=0.0, stop_token=None, stream=False, abort_after=None
        )
        assert answer(engine, ask) == expected(ask)


def test_long_generations_in_a_tiny_pool_are_whole(launch):
    engine = launch("--fake-workers", "--block-size", "4", "--num-blocks", "40")
    rng = random.Random(1)
    asks = [
        Ask([rng.randrange(3, VOCABULARY) for _ in range(8)], 120, 0, 0.0, None, False, None)
        for _ in range(6)
    ]
    with ThreadPoolExecutor(len(asks)) as pool:
        answers = list(pool.map(lambda ask: answer(engine, ask), asks))
    assert answers == [expected(ask) for ask in asks]
    assert all(len(tokens) == 120 for tokens in answers)

"""SmolLM2 in float32 through all processes: token for token what transformers generates."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

NUM_OUTPUT_TOKENS = 48

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Deutschland ist",
    "1, 2, 3, 4, 5, 6,",
    "Q: What is the boiling point of water?\nA:",
    "import numpy as np\n\nx = np.",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, Neil Armstrong",
    "To make a good cup of tea, first",
    "<html>\n<head>\n",
    "日本の首都は",
    "The three laws of thermodynamics are",
    "SELECT name, age FROM users WHERE",
    "She opened the door and saw",
    "Photosynthesis is the process by which",
    "Ingredients:\n- 2 cups of flour\n- 1 cup of sugar\n",
    "The difference between a list and a tuple in Python is",
    "To be, or not to be, that is",
]


@pytest.fixture(scope="module")
def reference():
    """What transformers generates greedily: prompt token ids to output token ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from worker.find_model import bundled_model

    path = Path(bundled_model())
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    # No token ends an answer, and none is forbidden, as a minimum length would forbid the end.
    model.generation_config.eos_token_id = None
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NUM_OUTPUT_TOKENS,
            pad_token_id=0,
        )
    return list(zip(prompts, out[:, width:].tolist(), strict=True))


def complete(engine, prompt, **fields):
    defaults = {
        "max_tokens": NUM_OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = engine.complete(prompt=prompt, **defaults | fields)
    return answer["choices"][0]["token_ids"], answer["usage"]


def complete_all(engine, prompts, **fields):
    """Complete all prompts at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: complete(engine, prompt, **fields), prompts))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="batched"),
        pytest.param(["--max-num-batched-tokens", "64", "--max-in-flight", "1"], id="chunked"),
        # 20 prompts of up to 61 tokens and 48 output tokens need 60 to 140 blocks; there are 24.
        pytest.param(["--num-blocks", "24", "--max-model-len", "256"], id="preempted"),
        pytest.param(["--tp", "3", "--max-model-len", "256"], id="three ranks"),
    ],
)
def test_greedy_tokens_equal_transformers(launch, reference, flags):
    engine = launch(*flags)
    answers = complete_all(engine, [prompt for prompt, _ in reference])
    assert [tokens for tokens, _ in answers] == [tokens for _, tokens in reference]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_three_ranks_say_what_transformers_says(launch, reference):
    # A step has 61 exchanges between the ranks, of milliseconds each: so few prompts and tokens.
    chosen = [(prompt, tokens[:16]) for prompt, tokens in reference[:4]]
    engine = launch("--tp", "3", "--device", "cpu", "--num-blocks", "64")
    answers = complete_all(engine, [prompt for prompt, _ in chosen], max_tokens=16)
    assert [tokens for tokens, _ in answers] == [tokens for _, tokens in chosen]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_prefix_hits_change_nothing(real_engine, reference):
    prompts = [prompt + answer[:32] for prompt, answer in reference]
    cold = complete_all(real_engine, prompts)
    warm = complete_all(real_engine, prompts)
    assert [tokens for tokens, _ in warm] == [tokens for tokens, _ in cold]
    for prompt, (_, usage) in zip(prompts, warm, strict=True):
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == (len(prompt) - 1) // 16 * 16
    for (_, answer), (tokens, _) in zip(reference, warm, strict=True):
        assert tokens[:16] == answer[32:]


def test_a_whole_prompt_of_exactly_some_blocks_twice(real_engine):
    prompt = random.Random(5).sample(range(1000, 40_000), 48)
    first, _ = complete(real_engine, prompt)
    second, usage = complete(real_engine, prompt)
    assert second == first
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32


def test_a_chat_answers_a_real_question(real_engine):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": question, "temperature": 0, "max_tokens": 40}
    answer = real_engine.post("/v1/chat/completions", body)
    choice = answer["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert "<|im_end|>" not in choice["message"]["content"]
    events = list(real_engine.events("/v1/chat/completions", body))
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"])
    assert text == choice["message"]["content"]
    reasons = [e["choices"][0]["finish_reason"] for e in events if e["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"]


def test_a_seed_decides_the_sample_whatever_else_runs(real_engine):
    body = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 1.0, "seed": 11}
    alone = real_engine.complete(**body)["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        others = [
            pool.submit(real_engine.complete, prompt="x", max_tokens=24, seed=i) for i in range(7)
        ]
        crowded = pool.submit(real_engine.complete, **body).result()["choices"][0]["text"]
        for other in others:
            other.result()
    assert crowded == alone
    other_seed = real_engine.complete(**{**body, "seed": 12})["choices"][0]["text"]
    assert other_seed != alone


@pytest.mark.slow
def test_greedy_tokens_are_the_likeliest_when_they_are_scored_as_a_prompt(real_engine):
    """As loglikelihood tasks ask for it: whatever is cached."""
    prompt = [504, 3575, 282, 4649, 314, 260, 2838, 1194]
    tokens, _ = complete(real_engine, prompt, max_tokens=12)
    body = {"prompt": prompt + tokens, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    for _ in range(2):
        answer = real_engine.complete(**body, echo=True)
        logprobs = answer["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == len(prompt + tokens) + 1
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        best = [max(top.values()) for top in logprobs["top_logprobs"][1:]]
        assert best[len(prompt) - 1 :] == logprobs["token_logprobs"][len(prompt) :]
        assert any(
            one < other for one, other in zip(logprobs["token_logprobs"][1:], best, strict=True)
        )
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # What it has computed, others find.
    _, usage = complete(real_engine, prompt + tokens, max_tokens=1)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16


@pytest.mark.slow
def test_what_may_not_be_output_is_not(real_engine):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": question, "temperature": 0, "max_tokens": 9}

    def answer(**fields):
        choice = real_engine.post("/v1/chat/completions", {**body, **fields})["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]

    text, reason = answer()
    assert "Paris" in text
    assert reason == "stop"
    assert "Paris" not in answer(bad_words=["Paris"])[0]
    assert answer(min_tokens=9)[1] == "length"
    (paris,) = real_engine.post("/tokenize", {"prompt": " Paris"})["tokens"]
    assert "Paris" not in answer(logit_bias={str(paris): -100})[0]
    assert answer(allowed_token_ids=[paris], max_tokens=3)[0] == " Paris" * 3

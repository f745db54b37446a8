"""Several ranks as real processes over gloo, with models small enough to answer at once."""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from protocol.columns import unpack_int32
from protocol.connection import Codec
from protocol.messages import SchedulerToWorker, StepPlan
from protocol.recording import read_recording
from tests.worker.tiny_models import reference_logits, save_llama, save_qwen3

VOCABULARY = 131
SMALL = ["--device", "cpu", "--threads", "1", "--block-size", "4"]


def prompt(length, seed):
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


def complete(engine, token_ids, num_tokens, **params):
    answer = engine.complete(
        prompt=token_ids,
        max_tokens=num_tokens,
        ignore_eos=True,
        return_token_ids=True,
        **{"temperature": 0, **params},
    )
    return answer["choices"][0]["token_ids"]


def complete_all(engine, prompts, num_tokens):
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda ids: complete(engine, ids, num_tokens), prompts))


def greedy(model, token_ids, num_tokens):
    """What transformers generates."""
    tokens = list(token_ids)
    for _ in range(num_tokens):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(token_ids) :]


def num_prefilled_again(recording):
    """How many sequences came to a rank with tokens of their own output."""
    codec = Codec(SchedulerToWorker)
    entries = read_recording(recording / "worker-1.tap")
    messages = [codec.decode(entry.frame) for entry in entries if entry.direction == "in"]
    plans = [message for message in messages if isinstance(message, StepPlan)]
    joins = [join for plan in plans for join in plan.joins]
    return sum(len(unpack_int32(join.token_ids)) > join.prompt_len for join in joins)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_preempted_sequence_goes_on_as_if_nothing_had_been(launch, tmp_path):
    model = save_llama(tmp_path, num_attention_heads=8)
    # Each of five sequences ends with 10 blocks; there are 24, and prefixes are not kept.
    flags = ["--model", str(tmp_path), "--tp", "2", "--num-blocks", "24", "--no-prefix-cache"]
    engine = launch(*flags, *SMALL, "--record", str(tmp_path / "recording"))
    prompts = [prompt(12 + seed % 3, seed) for seed in range(5)]
    answers = complete_all(engine, prompts, 26)
    assert answers == [greedy(model, ids, 26) for ids in prompts]
    code, _ = engine.stop()
    assert code == 0, engine.log
    assert engine.survivors() == []
    assert num_prefilled_again(tmp_path / "recording") > 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_draw_the_same_tokens_whatever_their_number(launch, tmp_path):
    save_qwen3(tmp_path, num_attention_heads=8)
    drawn = []
    for size in (1, 2, 4):
        engine = launch("--model", str(tmp_path), "--tp", str(size), *SMALL)
        drawn.append(
            [
                complete(engine, prompt(9, 1), 12),
                complete(engine, prompt(9, 1), 12, temperature=0.8, seed=3),
                complete(engine, prompt(9, 1), 12, temperature=0.8, seed=4, top_k=9, top_p=0.9),
            ]
        )
        engine.stop()
    assert drawn[0] == drawn[1] == drawn[2]
    assert len({tuple(tokens) for tokens in drawn[0]}) == 3


@pytest.mark.slow
def test_the_run_ends_when_a_rank_dies(launch, tmp_path):
    save_llama(tmp_path, num_attention_heads=8)
    engine = launch("--model", str(tmp_path), "--tp", "2", *SMALL)
    os.kill(engine.pids["worker-1"], signal.SIGKILL)
    code, log = engine.wait()
    assert code == 1
    assert "worker-" in log
    assert engine.survivors() == []


def test_sizes_that_do_not_divide_the_bundled_model_are_refused(cli):
    code, _, err = cli("--tp", "2")
    assert code == 2
    assert "--tp 2" in err
    assert "legal are 1, 3." in err

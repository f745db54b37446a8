"""The runner against transformers' greedy tokens, and its failures."""

import math
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from protocol.columns import unpack_float32, unpack_int32
from protocol.errors import ErrorCode, ProcessError
from protocol.messages import EngineFacts, SamplingParams
from tests.worker.logit_reference import reference_edits
from tests.worker.plan_builder import GREEDY, execute, make_join, make_plan
from tests.worker.thread_ranks import on_all, thread_ranks
from tests.worker.tiny_models import CPU, reference_logits, save_llama
from worker.attention.torch_attention import TorchAttention
from worker.host_blocks import HostBlocks
from worker.kv_cache import KVCache, KVCacheShape
from worker.model_files import read_model_config
from worker.model_loading import load_model
from worker.model_runner import ModelRunner
from worker.model_setup import layer_attentions
from worker.parallel import OneRank, TensorParallel
from worker.runner import StepOutput
from worker.sampling_slots import SamplingSlots
from worker.shard import divide_heads
from worker.sharded_sampler import ShardedSampler
from worker.slot_sampler import TorchSlotSampler


class Driver:
    """A runner and its plans."""

    def __init__(self, path: Path, *, group: TensorParallel | None = None) -> None:
        group = group or OneRank()
        config = read_model_config(path)
        self.model, _ = load_model(
            path, config, group=group, max_model_len=96, dtype=torch.float32, device=CPU
        )
        heads = divide_heads(
            config.num_heads, config.num_kv_heads, rank=group.rank, size=group.size
        )
        shape = KVCacheShape(
            num_layers=config.num_layers,
            num_kv_heads=heads.key_value.size,
            head_dim=config.head_dim,
            block_size=4,
        )
        self.cache = KVCache(shape, 64, dtype=torch.float32, device=CPU)
        self.facts = EngineFacts(
            rank=group.rank,
            back_end="torch",
            block_size=4,
            num_blocks=64,
            slots=8,
            max_model_len=96,
            vocab_size=config.vocab_size,
            host_blocks=16,
        )
        sampling = SamplingSlots(9, config.vocab_size, CPU)
        self.runner = ModelRunner(
            self.model,
            TorchAttention(self.cache, heads.query.size, layer_attentions(config)),
            self.cache,
            self.facts,
            sampling=sampling,
            sampler=TorchSlotSampler(sampling, ShardedSampler(config.vocab_size, group)),
            tp=group.size,
            min_rows=4,
            device=CPU,
            host_blocks=HostBlocks(self.cache, 16),
        )
        self._step_id = 0

    def step(self, **plan) -> StepOutput:
        self._step_id += 1
        return execute(self.runner, make_plan(self._step_id, **plan))

    def start(self, prompts: list[list[int]], params: list[SamplingParams] | None = None):
        """Join every prompt, with 12 blocks each, and prefill it."""
        joins = [
            make_join(
                slot,
                prompt,
                range(12 * slot, 12 * slot + 12),
                generation=self._step_id,
                **({} if params is None else {"params": params[slot]}),
            )
            for slot, prompt in enumerate(prompts)
        ]
        chunks = [(slot, 0, len(prompt), 1) for slot, prompt in enumerate(prompts)]
        return self.step(joins=joins, chunks=chunks)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("tiny")
    return path, save_llama(path)


PROMPTS = [[5, 6, 7, 8, 9], [100] * 11, [1]]


def test_a_sequence_that_was_on_the_host_goes_on_as_it_would_have(tiny):
    path, reference = tiny
    driver = Driver(path)
    tokens = PROMPTS[0] + driver.start(PROMPTS).tokens[:1].tolist()
    # What is left of its blocks is the next one's to write.
    driver.step(
        leaves=[0],
        swap_outs=[(0, 5), (1, 3)],
        joins=[make_join(0, PROMPTS[1], [0, 1, 2], generation=9)],
        chunks=[(0, 0, 11, 1)],
    )
    output = driver.step(
        swap_ins=[(5, 50), (3, 51)],
        joins=[make_join(3, tokens, [50, 51], generation=9, prompt_len=5)],
        chunks=[(3, 5, 1, 1)],
    )
    assert int(output.tokens[0]) == int(reference_logits(reference, tokens)[-1].argmax())


def test_greedy_tokens_are_transformers(tiny):
    path, reference = tiny
    driver = Driver(path)
    assert driver.runner.facts == driver.facts
    outputs = [driver.start(PROMPTS)] + [driver.step(decode=[0, 1, 2]) for _ in range(20)]
    for slot, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for output in outputs:
            assert output.counts.tolist() == [1, 1, 1]
            expected = int(reference_logits(reference, tokens)[-1].argmax())
            assert output.tokens[slot] == expected
            tokens.append(expected)


def test_rows_in_plan_order_and_unfinished_chunks(tiny):
    path, reference = tiny
    driver = Driver(path)
    driver.start(PROMPTS[:1])
    output = driver.step(
        decode=[0],
        joins=[make_join(2, PROMPTS[1], range(20, 23)), make_join(1, [7, 8], [30])],
        chunks=[(2, 0, 4, 0), (1, 0, 2, 1)],
    )
    assert output.counts.tolist() == [1, 0, 1]
    assert output.tokens[1] == int(reference_logits(reference, [7, 8])[-1].argmax())
    output = driver.step(chunks=[(2, 4, 4, 0)])
    assert output.counts.tolist() == [0]
    assert output.tokens.tolist() == []
    output = driver.step(chunks=[(2, 8, 3, 1)])
    assert output.tokens.tolist() == [int(reference_logits(reference, PROMPTS[1])[-1].argmax())]


def test_sampling_depends_on_seed_and_position_only(tiny):
    path, _ = tiny
    draws = []
    for slots, budget in (([0], 11), ([2], 4), ([3, 0, 1], 11)):
        driver = Driver(path)
        tokens: list[int] = []
        for slot in slots[1:]:
            driver.step(joins=[make_join(slot, [9] * 3, [50 + slot])], chunks=[(slot, 0, 3, 1)])
        params = SamplingParams(temperature=1.0, seed=77, top_p=0.9)
        joins = [make_join(slots[0], PROMPTS[1], range(12), params=params)]
        for start in range(0, 11, budget):
            count = min(budget, 11 - start)
            chunks = [(slots[0], start, count, int(start + count == 11))]
            output = driver.step(joins=joins, chunks=chunks)
            joins = []
        tokens += output.tokens.tolist()
        for _ in range(15):
            tokens.append(int(driver.step(decode=[slots[0]]).tokens[0]))
        draws.append(tokens)
    assert draws[0] == draws[1] == draws[2]
    assert len(set(draws[0])) > 3


EDITED = SamplingParams(
    temperature=1.0,
    seed=77,
    presence_penalty=0.3,
    frequency_penalty=0.9,
    repetition_penalty=1.2,
    logit_bias={4: 1.5, 9: -2.0},
    bad_word_ids=[[100], [5, 6]],
    min_tokens=6,
    stop_token_ids=[2, 17],
)


def test_greedy_tokens_of_edited_logits(tiny):
    """Beside a neighbour without edits, whose tokens stay the model's."""
    path, reference = tiny
    driver = Driver(path)
    params = [msgspec.structs.replace(EDITED, temperature=0.0), GREEDY]
    outputs = [driver.start(PROMPTS[:2], params)]
    outputs += [driver.step(decode=[0, 1]) for _ in range(15)]
    tokens = [list(prompt) for prompt in PROMPTS[:2]]
    for output in outputs:
        logits = [reference_logits(reference, known)[-1] for known in tokens]
        edited = reference_edits(logits[0].tolist(), params[0], PROMPTS[0], tokens[0][5:])
        expected = [int(np.argmax(edited)), int(logits[1].argmax())]
        assert output.tokens.tolist() == expected
        for known, token in zip(tokens, expected, strict=True):
            known.append(token)
    assert len(set(tokens[0])) > len(set(tokens[1]))


def test_edited_samples_do_not_depend_on_neighbours_or_preemption(tiny):
    path, _ = tiny
    alone = Driver(path)
    expected = alone.start([PROMPTS[0]], [EDITED]).tokens.tolist()
    expected += [int(alone.step(decode=[0]).tokens[0]) for _ in range(14)]

    driver = Driver(path)
    filtered = SamplingParams(temperature=0.8, seed=3, top_k=9)
    tokens = driver.start(PROMPTS, [EDITED, filtered, EDITED]).tokens.tolist()[:1]
    tokens += [int(driver.step(decode=[0, 1, 2]).tokens[0]) for _ in range(6)]
    # What was computed after the last committed token is dropped, and counts for nothing.
    driver.step(decode=[0])
    resumed = make_join(
        3, PROMPTS[0] + tokens, range(50, 60), generation=9, prompt_len=5, params=EDITED
    )
    output = driver.step(leaves=[0], joins=[resumed], chunks=[(3, 0, 12, 1)], decode=[1])
    tokens.append(int(output.tokens[1]))
    tokens += [int(driver.step(decode=[1, 3]).tokens[1]) for _ in range(7)]
    assert tokens == expected
    assert len(set(tokens)) > 5


def test_logprobs(tiny):
    path, reference = tiny
    driver = Driver(path)
    params = [
        SamplingParams(temperature=0.0, seed=0, logprobs=2),
        SamplingParams(temperature=0.0, seed=0),
        SamplingParams(temperature=0.0, seed=0, logprobs=0),
    ]
    output = driver.start(PROMPTS, params)
    columns = output.logprobs
    assert columns is not None
    assert unpack_int32(columns.rows) == [0, 2]
    assert unpack_int32(columns.positions) == [5, 1]
    assert unpack_int32(columns.n) == [3, 1]
    ids, values = unpack_int32(columns.ids), unpack_float32(columns.values)
    assert ids[0] == output.tokens[0]
    assert ids[3] == output.tokens[2]
    expected = reference_logits(reference, PROMPTS[0])[-1].log_softmax(-1)
    assert ids[1:3] == expected.topk(2).indices.tolist()
    assert values[:3] == pytest.approx([float(expected[i]) for i in ids[:3]], abs=1e-4)
    assert driver.step(decode=[1]).logprobs is None


@pytest.mark.parametrize("budget", [11, 4])
def test_prompts_are_scored(tiny, budget: int):
    """Beside a decode row and a chunk that does not want it, in whatever pieces."""
    path, reference = tiny
    driver = Driver(path)
    driver.start(PROMPTS[:1])
    params = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=2, logprobs=0)
    joins = [
        make_join(2, [7, 8], [30]),
        make_join(1, [*PROMPTS[1], 3], range(20, 23), prompt_len=11, params=params),
    ]
    found, ranks = {}, []
    for start in range(0, 12, budget):
        count = min(budget, 12 - start)
        chunks = [(2, 0, 2, 1)] if start == 0 else []
        chunks.append((1, start, count, int(start + count == 12)))
        output = driver.step(joins=joins, decode=[0], chunks=chunks)
        joins = []
        columns = output.prompt_logprobs
        assert (output.logprobs is not None) == bool(chunks[-1][3])
        if columns is None:
            assert start >= 10
            continue
        assert set(unpack_int32(columns.rows)) == {len(chunks)}
        assert set(unpack_int32(columns.n)) == {3}
        ids = np.array(unpack_int32(columns.ids)).reshape(-1, 3).tolist()
        values = np.array(unpack_float32(columns.values)).reshape(-1, 3).tolist()
        positions = unpack_int32(columns.positions)
        found |= dict(zip(positions, zip(ids, values, strict=True), strict=True))
        ranks += unpack_int32(columns.ranks)
    expected = reference_logits(reference, PROMPTS[1]).log_softmax(-1)
    assert list(found) == list(range(1, 11))
    for position, (ids, values) in found.items():
        row = expected[position - 1]
        assert ids == [PROMPTS[1][position], *row.topk(2).indices.tolist()]
        assert values == pytest.approx([float(row[i]) for i in ids], abs=1e-4)
        assert ranks[position - 1] == int((row >= row[ids[0]]).sum())


def poison(driver: Driver, token: int) -> None:
    driver.model.embedding.weight[token] = math.nan


def test_a_row_of_nan_fails_alone(tiny):
    path, reference = tiny
    driver = Driver(path)
    poison(driver, 100)
    params = [SamplingParams(temperature=0.0, seed=0, logprobs=0)] * 3
    output = driver.start(PROMPTS, params)
    assert output.counts.tolist() == [1, -1, 1]
    assert output.failures.tolist() == [ErrorCode.NUMERIC]
    assert output.logprobs is not None
    assert unpack_int32(output.logprobs.rows) == [0, 2]
    # The failed slot is answered, uncomputed, until it leaves; whoever gets its blocks is unharmed.
    assert driver.step(decode=[1]).counts.tolist() == [-1]
    blocks = [12, 13, 14, 15]
    output = driver.step(
        leaves=[1], joins=[make_join(4, PROMPTS[0], blocks)], decode=[0], chunks=[(4, 0, 5, 1)]
    )
    assert output.counts.tolist() == [1, 1]
    tokens = [*PROMPTS[0], int(output.tokens[1])]
    for _ in range(6):
        token = int(driver.step(decode=[4]).tokens[0])
        assert token == int(reference_logits(reference, tokens)[-1].argmax())
        tokens.append(token)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_fails_the_steps_rows(
    tiny, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def raise_error(*_):
        raise error

    path, _ = tiny
    driver = Driver(path)
    group = on_all(partial(Driver, path, group=rank) for rank in thread_ranks(2))
    on_all(partial(rank.start, PROMPTS[:1]) for rank in group)
    driver.start(PROMPTS[:2])
    for one in (driver, *group):
        monkeypatch.setattr(one.model, "forward", raise_error)
    output = driver.step(decode=[0], new_blocks=[(1, 0, 63)])
    assert output.counts.tolist() == [-1]
    assert output.failures.tolist() == [ErrorCode.OUT_OF_MEMORY]
    for rank in group:
        with pytest.raises(ProcessError, match="Step 2 ran out of memory"):
            rank.step(decode=[0])
    monkeypatch.undo()
    output = driver.step(
        leaves=[0], joins=[make_join(2, [4], [0])], decode=[1], chunks=[(2, 0, 1, 1)]
    )
    # Slot 1 has no way to know whether its new block has come through.
    assert output.counts.tolist() == [-1, 1]


def test_other_errors_pass(tiny, monkeypatch: pytest.MonkeyPatch):
    def raise_error(*_):
        raise RuntimeError("shapes differ")

    path, _ = tiny
    driver = Driver(path)
    monkeypatch.setattr(driver.model, "forward", raise_error)
    with pytest.raises(RuntimeError, match="shapes differ"):
        driver.start(PROMPTS[:1])


# ------------------------------------------------------------------------------
# Several ranks

MIXED_PARAMS = [
    SamplingParams(temperature=0.0, seed=0, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.9, seed=6, top_k=20, top_p=0.9, logprobs=0),
]


EDITED_PARAMS = [msgspec.structs.replace(EDITED, temperature=0.0), MIXED_PARAMS[2], EDITED]


@pytest.mark.parametrize(
    ("size", "params"), [(2, MIXED_PARAMS), (4, MIXED_PARAMS), (2, EDITED_PARAMS)]
)
def test_ranks_report_what_one_rank_does(tiny_of_eight_heads: Path, size: int, params):
    """131 tokens divide by neither size; two KV heads are shared by four ranks."""

    def run(driver: Driver) -> list[StepOutput]:
        return [
            driver.start(PROMPTS, params),
            driver.step(decode=[2, 0]),
            *(driver.step(decode=[0, 1, 2]) for _ in range(8)),
        ]

    expected = run(Driver(tiny_of_eight_heads))
    drivers = on_all(
        partial(Driver, tiny_of_eight_heads, group=rank) for rank in thread_ranks(size)
    )
    for rank, outputs in enumerate(on_all(partial(run, driver) for driver in drivers)):
        for output, alone in zip(outputs, expected, strict=True):
            assert output.tokens.tolist() == alone.tokens.tolist()
            assert output.counts.tolist() == alone.counts.tolist()
            assert (output.logprobs is None) == (rank > 0 or alone.logprobs is None)
            scores, alones = output.prompt_logprobs, alone.prompt_logprobs
            assert (scores is None) == (rank > 0 or alones is None)
            if scores is not None:
                assert (scores.ids, scores.ranks) == (alones.ids, alones.ranks)
            if output.logprobs is not None:
                assert output.logprobs.ids == alone.logprobs.ids
                assert unpack_float32(output.logprobs.values) == pytest.approx(
                    unpack_float32(alone.logprobs.values), abs=1e-4
                )


def test_a_row_of_nan_fails_on_every_rank(tiny_of_eight_heads: Path):
    drivers = on_all(partial(Driver, tiny_of_eight_heads, group=rank) for rank in thread_ranks(2))
    # Only the last rank has a bad weight, and only for one of its tokens.
    head = drivers[1].model.output.product
    head._product = lambda hidden: torch.where(
        hidden.new_tensor([[False]] + [[True]] + [[False]] * 2).bool(),
        torch.full((4, 65), math.nan),
        torch.zeros(4, 65),
    )
    for output in on_all(partial(driver.start, PROMPTS, MIXED_PARAMS) for driver in drivers):
        assert output.counts.tolist() == [1, -1, 1]
        assert output.failures.tolist() == [ErrorCode.NUMERIC]


@pytest.fixture(scope="module")
def tiny_of_eight_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eight")
    save_llama(path, num_attention_heads=8)
    return path

"""Everything about graphs but the capture itself: `benchmarks.gpu_check` replays them."""

from pathlib import Path

import pytest
import torch

from benchmarks.teacher_forcing import compare, make_references, random_prompts
from protocol.errors import ConfigError
from protocol.messages import EngineFacts, SamplingParams
from tests.worker.plain_kernels import PlainKernels
from tests.worker.plan_builder import execute, make_join, make_plan
from tests.worker.tiny_models import CPU, save_llama
from worker.attention.paged import PagedAttention, write_by_torch
from worker.batch import SampledRows
from worker.chunk_graphs import ChunkGraph
from worker.graph_store import GraphStore
from worker.kv_cache import KVCache, KVCacheShape, KVLayout
from worker.model_files import read_model_config
from worker.model_loading import load_model
from worker.model_runner import ModelRunner
from worker.model_setup import layer_attentions
from worker.parallel import OneRank
from worker.sampling_slots import SamplingSlots, Variant
from worker.sharded_sampler import ShardedSampler
from worker.slot_sampler import TorchSlotSampler


class EagerGraph:
    """Runs what a graph would replay."""

    def __init__(self, step) -> None:
        self.replay = step


class EagerStore(GraphStore):
    def _captured(self, step) -> EagerGraph:
        step()
        return EagerGraph(step)


class TorchDraw:
    """Draws as a GPU's sampler does, by torch."""

    def __init__(self, sampling: SamplingSlots, sampler: TorchSlotSampler) -> None:
        self._sampling = sampling
        self._sampler = sampler

    def __call__(self, logits, slots, indices, reported, *, variant: Variant) -> None:
        host_slots = slots.numpy()
        assert variant >= self._sampling.variant(host_slots)
        rows = SampledRows(slots=slots.long(), indices=indices.long(), host_slots=host_slots)
        reported.copy_(self._sampler.sample(logits, rows))


def make_runner(path: Path, *, with_graphs: bool) -> ModelRunner:
    config = read_model_config(path)
    model, _ = load_model(
        path, config, group=OneRank(), max_model_len=640, dtype=torch.float32, device=CPU
    )
    shape = KVCacheShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
    )
    cache = KVCache(shape, 200, dtype=torch.float32, device=CPU, layout=KVLayout.BLOCKS_FIRST)
    cache.data.fill_(float("nan"))
    facts = EngineFacts(
        rank=0,
        back_end="fa3",
        block_size=16,
        num_blocks=200,
        slots=5,
        max_model_len=640,
        vocab_size=config.vocab_size,
    )
    attention = PagedAttention(cache, PlainKernels(), write_by_torch, layer_attentions(config))
    sampling = SamplingSlots(facts.slots + 1, config.vocab_size, CPU)
    sampler = TorchSlotSampler(sampling, ShardedSampler(config.vocab_size, OneRank()))
    runner = ModelRunner(
        model,
        attention,
        cache,
        facts,
        sampling=sampling,
        sampler=sampler,
        tp=1,
        min_rows=1,
        device=CPU,
    )
    if with_graphs:
        runner.capture_graphs(attention, TorchDraw(sampling, sampler))
    return runner


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("worker.model_runner.GraphStore", EagerStore)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("tiny")
    return path, save_llama(path, max_position_embeddings=640)


@pytest.mark.slow
def test_greedy_tokens_are_transformers(tiny):
    path, model = tiny
    prompts = random_prompts(131, (7, 137, 267, 397, 527), num_each=1)
    references = make_references(model, prompts, num_tokens=5)
    found = compare(make_runner(path, with_graphs=True), references, max_chunk=150)
    assert (found.positions, found.differing) == (25, 0)


PARAMS = {
    "drawn": SamplingParams(temperature=0.9, seed=11),
    "filtered": SamplingParams(temperature=0.9, seed=11, top_k=5),
    "logprobs": SamplingParams(temperature=0.0, seed=0, logprobs=2),
    "edited": SamplingParams(temperature=0.9, seed=11, frequency_penalty=1.0, logit_bias={3: 2.0}),
}


@pytest.mark.parametrize("kind", PARAMS)
def test_same_as_eager_steps(tiny, kind: str):
    path, _ = tiny
    joins = [
        make_join(0, [5, 6, 7], range(3)),
        make_join(3, [9] * 20, range(3, 6), params=PARAMS[kind]),
        make_join(4, [1], range(6, 9), params=SamplingParams(temperature=0.7, seed=5)),
    ]
    plans = [make_plan(1, joins=joins, chunks=[(0, 0, 3, 1), (3, 0, 20, 1), (4, 0, 1, 1)])]
    plans += [make_plan(step, decode=[0, 3, 4]) for step in range(2, 8)]
    eager, replayed = (make_runner(path, with_graphs=on) for on in (False, True))
    for plan in plans:
        expected, output = execute(eager, plan), execute(replayed, plan)
        assert output.tokens.tolist() == expected.tokens.tolist()
        assert (output.logprobs is None) == (kind != "logprobs")
        if output.logprobs is not None:
            assert expected.logprobs is not None
            assert output.logprobs.ids == expected.logprobs.ids


def test_a_row_of_nan_fails_alone(tiny):
    path, _ = tiny
    runner = make_runner(path, with_graphs=True)
    runner._model.embedding.weight[100] = float("nan")
    joins = [make_join(0, [5, 6], range(2)), make_join(1, [7, 8], range(2, 4))]
    execute(runner, make_plan(1, joins=joins, chunks=[(0, 0, 2, 1), (1, 0, 2, 1)]))
    runner._sampling.last_tokens[1] = 100
    output = execute(runner, make_plan(2, decode=[0, 1]))
    assert output.counts.tolist() == [1, -1]
    assert execute(runner, make_plan(3, decode=[0, 1])).counts.tolist() == [1, -1]


@pytest.mark.parametrize("kind", PARAMS)
def test_steps_with_chunks(tiny, kind: str):
    """Chunks beside decode rows, first run eagerly, then as graphs."""
    path, _ = tiny
    prompt = list(range(40, 76))
    plans = [make_plan(1, joins=[make_join(0, [5, 6, 7], range(3))], chunks=[(0, 0, 3, 1)])]
    for index in range(4):
        slot = 1 + index
        first = 10 * slot
        join = make_join(slot, prompt, range(first, first + 4), params=PARAMS[kind])
        decode = [0, *range(1, slot)]
        step = len(plans) + 1
        plans += [
            make_plan(step, joins=[join], decode=decode, chunks=[(slot, 0, 20, 0)]),
            make_plan(step + 1, decode=decode, chunks=[(slot, 20, 16, 1)]),
        ]
    eager, replayed = (make_runner(path, with_graphs=on) for on in (False, True))
    for plan in plans:
        expected, output = execute(eager, plan), execute(replayed, plan)
        assert output.tokens.tolist() == expected.tokens.tolist()
        assert output.counts.tolist() == expected.counts.tolist()
        assert (output.logprobs is None) == (expected.logprobs is None)
        if output.logprobs is not None:
            assert output.logprobs.ids == expected.logprobs.ids
            assert output.logprobs.rows == expected.logprobs.rows
    store = replayed._graphs.chunks._store
    captured = [name for name in store._graphs if isinstance(name, ChunkGraph)]
    sizes = {(graph.num_tokens, graph.num_sequences) for graph in captured}
    assert sizes == ({(32, 5)} if kind != "edited" else set())


def test_no_memory_for_graphs_at_the_start_is_told(tiny, monkeypatch: pytest.MonkeyPatch):
    def none_left(self, step):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(EagerStore, "_captured", none_left)
    with pytest.raises(ConfigError, match=r"^There is no memory left for CUDA graphs: lower "):
        make_runner(tiny[0], with_graphs=True)

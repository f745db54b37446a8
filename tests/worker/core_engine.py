"""The scheduler's core and a real model's ranks in one process, without sockets."""

from functools import partial

import torch

from protocol.columns import pack_int32, unpack_int32, unpack_int64
from protocol.messages import AddSequence, EngineFacts, StepResult
from scheduler.policy import ThroughputPolicy
from scheduler.scheduler import Scheduler
from tests.worker.plain_kernels import PlainKernels
from tests.worker.plan_builder import execute
from tests.worker.thread_ranks import on_all, thread_ranks
from tests.worker.tiny_models import CPU
from worker.attention.paged import PagedAttention, write_by_torch
from worker.attention.torch_attention import TorchAttention
from worker.kv_cache import KVCache, KVCacheShape, KVLayout
from worker.kv_rounding import E4M3
from worker.model_files import read_model_config
from worker.model_loading import load_model
from worker.model_runner import ModelRunner
from worker.model_setup import layer_attentions
from worker.sampling_slots import SamplingSlots
from worker.shard import divide_heads
from worker.sharded_sampler import ShardedSampler
from worker.slot_sampler import TorchSlotSampler


class CoreEngine:
    """A scheduler and its ranks, in threads while they compute."""

    def __init__(
        self,
        path,
        *,
        block_size,
        tp=2,
        max_model_len=64,
        max_tokens=64,
        is_paged=False,
        prefix_key=None,
        is_fp8=False,
    ):
        self.is_paged = is_paged
        self.kv_dtype = E4M3 if is_fp8 else torch.float32
        self.config = read_model_config(path)
        self.facts = EngineFacts(
            rank=0,
            back_end="torch",
            block_size=block_size,
            num_blocks=4 * max_model_len // block_size,
            slots=4,
            max_model_len=max_model_len,
            vocab_size=self.config.vocab_size,
        )
        self.scheduler = Scheduler(
            self.facts,
            ThroughputPolicy(max_tokens),
            max_in_flight=1,
            prefix_key=prefix_key,
            max_waiting_requests=10,
            max_waiting_tokens=1000,
        )
        self.ranks = on_all(partial(self._runner, path, rank) for rank in thread_ranks(tp))
        self.num_copies = 0

    def _runner(self, path, group):
        config, facts = self.config, self.facts
        model, _ = load_model(
            path,
            config,
            group=group,
            max_model_len=facts.max_model_len,
            dtype=torch.float32,
            device=CPU,
        )
        heads = divide_heads(
            config.num_heads, config.num_kv_heads, rank=group.rank, size=group.size
        )
        shape = KVCacheShape(
            num_layers=config.num_layers,
            num_kv_heads=heads.key_value.size,
            head_dim=config.head_dim,
            block_size=facts.block_size,
        )
        layout = KVLayout.BLOCKS_FIRST if self.is_paged else KVLayout.HEADS_FIRST
        cache = KVCache(shape, facts.num_blocks, dtype=self.kv_dtype, device=CPU, layout=layout)
        if self.is_paged:
            attention = PagedAttention(
                cache, PlainKernels(), write_by_torch, layer_attentions(config)
            )
        else:
            cache.data[:, :, :, : facts.num_blocks] = float("nan")
            attention = TorchAttention(
                cache, heads.query.size, layer_attentions(config), torch.float32
            )
        sampling = SamplingSlots(facts.slots + 1, config.vocab_size, CPU)
        return ModelRunner(
            model,
            attention,
            cache,
            facts,
            sampling=sampling,
            sampler=TorchSlotSampler(sampling, ShardedSampler(config.vocab_size, group)),
            tp=group.size,
            min_rows=4,
            device=CPU,
        )

    def generate(self, prompt, asked):
        """Run (request, sample, params) on the prompt; return each one's tokens."""
        outputs = {}
        for request_id, sample, params in asked:
            outputs[request_id, sample] = []
            message = AddSequence(
                request_id=request_id, sample=sample, prompt_ids=pack_int32(prompt), params=params
            )
            assert self.scheduler.add(b"frontend", message) == []
        while (plan := self.scheduler.schedule()) is not None:
            self.num_copies += len(plan.copies) // 8
            output = on_all(partial(execute, rank, plan) for rank in self.ranks)[0]
            result = StepResult(
                step_id=plan.step_id,
                digest=0,
                tokens=output.tokens.tobytes(),
                counts=output.counts.tobytes(),
            )
            for _, deltas in self.scheduler.commit(result):
                tokens = iter(unpack_int32(deltas.token_ids))
                for request_id, sample, count in zip(
                    unpack_int64(deltas.requests),
                    unpack_int32(deltas.samples),
                    unpack_int32(deltas.counts),
                    strict=True,
                ):
                    outputs[request_id, sample] += [next(tokens) for _ in range(count)]
            self.scheduler.check_invariants()
        return list(outputs.values())

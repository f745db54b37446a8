"""Prefill first, without mixing: the rule of nano-vLLM's scheduler, as something to compare with.

While anybody waits and fits, a step computes whole prompts and nothing else; only then does every
running sequence decode, one token a step. The next step is decided when the last one has ended.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from benchmarks.simulation.card import Card
from benchmarks.simulation.replica import Outcome
from benchmarks.simulation.trace import TraceRequest
from scheduler.step_cost import StepWork, chunk_pairs

MAX_BATCHED_TOKENS = 16_384


@dataclass(slots=True)
class _Running:
    request: TraceRequest
    length: int
    last_token_at: float

    @property
    def is_complete(self) -> bool:
        return self.length >= self.request.num_prompt_tokens + self.request.num_output_tokens


def prefill_first(trace: list[TraceRequest], card: Card, max_num_seqs: int) -> Outcome:
    """Return what a trace's requests get by that rule.

    Its cache never overflows and finds no prefixes: both would only make the rule look worse or
    better for reasons that have nothing to do with it.
    """
    outcome = Outcome()
    arrivals = deque(trace)
    waiting: deque[TraceRequest] = deque()
    running: list[_Running] = []
    now = 0.0
    while arrivals or waiting or running:
        if not waiting and not running:
            now = max(now, arrivals[0].arrival_s)
        while arrivals and arrivals[0].arrival_s <= now:
            waiting.append(arrivals.popleft())
        batch: list[TraceRequest] = []
        room = MAX_BATCHED_TOKENS
        while waiting and len(running) + len(batch) < max_num_seqs:
            if waiting[0].num_prompt_tokens > room and batch:
                break
            room -= waiting[0].num_prompt_tokens
            batch.append(waiting.popleft())
        outcome.steps += 1
        if batch:
            lengths = [each.num_prompt_tokens for each in batch]
            pairs = sum(chunk_pairs(0, length) for length in lengths)
            now += card.cost.seconds(StepWork(sum(lengths), 0, pairs)) + 2 * card.hop_s
            outcome.first_token.add(np.array([now - each.arrival_s for each in batch]))
            running += [_Running(each, each.num_prompt_tokens + 1, now) for each in batch]
            outcome.output_tokens += len(batch)
        else:
            num_read = sum(each.length for each in running)
            now += card.cost.seconds(StepWork(len(running), num_read, 0)) + 2 * card.hop_s
            outcome.gap.add(now - np.array([each.last_token_at for each in running]))
            for each in running:
                each.length += 1
                each.last_token_at = now
            outcome.output_tokens += len(running)
        complete = [each for each in running if each.is_complete]
        if complete:
            running = [each for each in running if not each.is_complete]
            outcome.finished += len(complete)
            outcome.end_s = now
    return outcome

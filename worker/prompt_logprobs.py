"""The log-probabilities of prompts: which positions of a step's chunks to score, and scoring them.

The hidden state at a position scores the token after it. Logits are as wide as the vocabulary and a
chunk may have thousands of tokens, so they are computed for a few rows at a time, and only what is
reported of them is kept.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.models.causal_lm import CausalLM
from worker.sampler import top_logprobs
from worker.slot_sampler import SlotSampler
from worker.step_rows import Int32Array, StepRows
from worker.upload import Int64Array

ROWS_AT_ONCE = 128
"""Rows whose logits are there at the same time."""
NOT_WANTED = -1


class ScoredRows(NamedTuple):
    """The prompt tokens that a step scores, in the order of its rows."""

    hidden_rows: Int64Array
    """[scored] each one's row among the step's tokens: that of the token before it."""
    rows: Int32Array
    """[scored] its row in the plan."""
    positions: Int32Array
    """[scored] its index in the prompt."""
    tokens: Int32Array
    """[scored] the token."""
    counts: Int32Array
    """[scored] values to report, its own included."""


class Scores(NamedTuple):
    """What is known of each scored token, on the device."""

    ids: Tensor
    """[scored, 1 + most] int32, the token and then the likeliest."""
    values: Tensor
    """[scored, 1 + most] float32"""
    ranks: Tensor
    """[scored] int32"""


def find_scored(
    rows: StepRows,
    wanted: Int32Array,
    token_ids: list[Int32Array],
    prompt_lens: Int32Array,
) -> ScoredRows | None:
    """Return what a step is to score, or None.

    By slot: `wanted` [slots] is the number of likeliest tokens to report, NOT_WANTED where nothing
    is; `token_ids` are the known tokens, the first `prompt_lens` [slots] of them the prompt.
    """
    parts: list[tuple[NDArray[np.integer], ...]] = []
    first = len(rows.decode_slots)
    for chunk in rows.chunks:
        slot = chunk.slot
        # The position after the chunk is scored too, if it is the prompt's.
        count = min(chunk.end, int(prompt_lens[slot]) - 1) - chunk.start
        if wanted[slot] != NOT_WANTED and count > 0:
            positions = np.arange(chunk.start + 1, chunk.start + 1 + count, dtype=np.int32)
            parts.append(
                (
                    np.arange(first, first + count, dtype=np.int64),
                    np.full(count, chunk.row, dtype=np.int32),
                    positions,
                    token_ids[slot][positions],
                    np.full(count, 1 + wanted[slot], dtype=np.int32),
                )
            )
        first += len(chunk.token_ids)
    if not parts:
        return None
    return ScoredRows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def score(
    model: CausalLM, sampler: SlotSampler, hidden: Tensor, tokens: Tensor, num_top: int
) -> Scores:
    """Return the log-probabilities of tokens. Every rank must call it with as many rows.

    `hidden` [scored, hidden] is the state before each token, `tokens` [scored] int64.
    """
    parts = []
    for start in range(0, len(tokens), ROWS_AT_ONCE):
        piece = slice(start, start + ROWS_AT_ONCE)
        logits = sampler.whole_logits(model.logits(hidden[piece])).float()
        own = tokens[piece]
        ids, values = top_logprobs(logits, own, num_top)
        # By the logits themselves: of equal ones each counts, so that the likeliest has rank 1 and
        # two of them have rank 2.
        ranks = (logits >= logits.gather(1, own[:, None])).sum(dim=-1)
        parts.append((ids.to(torch.int32), values, ranks.to(torch.int32)))
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))

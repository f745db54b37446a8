"""Which prompt tokens a step scores; that the numbers are right is test_model_runner's too."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from worker.chunk_inputs import no_rows
from worker.prompt_logprobs import NOT_WANTED, ROWS_AT_ONCE, find_scored, score
from worker.step_rows import Chunk


def chunk(row, slot, start, tokens):
    return Chunk(
        row=row, slot=slot, start=start, token_ids=np.array(tokens, np.int32), is_last=False
    )


def find(chunks, wanted, token_ids, prompt_lens, *, num_decode=2):
    rows = replace(
        no_rows(), decode_slots=np.arange(num_decode, dtype=np.int32), chunks=tuple(chunks)
    )
    return find_scored(
        rows,
        np.array(wanted, dtype=np.int32),
        [np.array(ids, dtype=np.int32) for ids in token_ids],
        np.array(prompt_lens, dtype=np.int32),
    )


KNOWN = [[10, 11, 12, 13, 14], [20, 21, 22], [30, 31, 32, 33]]


def test_the_token_after_each_of_a_chunk():
    chunks = [chunk(2, 0, 1, [11, 12]), chunk(3, 1, 0, [20, 21, 22]), chunk(4, 2, 0, [30, 31])]
    found = find(chunks, [3, NOT_WANTED, 0], KNOWN, [5, 3, 4])
    # Behind two decode rows; those of the second chunk are not wanted.
    assert found.hidden_rows.tolist() == [2, 3, 7, 8]
    assert found.rows.tolist() == [2, 2, 4, 4]
    assert found.positions.tolist() == [2, 3, 1, 2]
    assert found.tokens.tolist() == [12, 13, 31, 32]
    assert found.counts.tolist() == [4, 4, 1, 1]


@pytest.mark.parametrize(
    ("start", "count", "prompt_len", "positions"),
    [
        (0, 5, 5, [1, 2, 3, 4]),
        (0, 4, 5, [1, 2, 3, 4]),
        (4, 1, 5, None),
        (3, 2, 5, [4]),
        (0, 5, 3, [1, 2]),
        (2, 3, 3, None),
        (0, 1, 1, None),
    ],
)
def test_output_is_not_scored(start, count, prompt_len, positions):
    tokens = KNOWN[0][start : start + count]
    found = find([chunk(2, 0, start, tokens)], [0], KNOWN, [prompt_len])
    assert (found and found.positions.tolist()) == positions


def test_steps_without_such_chunks_score_nothing():
    assert find([], [3], KNOWN, [5]) is None
    assert find([chunk(2, 1, 0, [20])], [3, NOT_WANTED], KNOWN, [5, 3]) is None


def test_logits_are_made_for_few_rows_at_a_time():
    num_rows = 2 * ROWS_AT_ONCE + 3
    logits = torch.randn(num_rows, 40, generator=torch.Generator().manual_seed(0)).round()
    sizes = []

    def few(hidden):
        sizes.append(len(hidden))
        return logits[hidden[:, 0]]

    tokens = torch.arange(num_rows) % 40
    scores = score(
        SimpleNamespace(logits=few),
        SimpleNamespace(whole_logits=lambda part: part),
        torch.arange(num_rows)[:, None],
        tokens,
        2,
    )
    assert sizes == [ROWS_AT_ONCE, ROWS_AT_ONCE, 3]
    expected = logits.double().log_softmax(-1)
    own = expected.gather(1, tokens[:, None])
    assert torch.equal(scores.ids[:, 0].long(), tokens)
    torch.testing.assert_close(scores.values[:, :1].double(), own, atol=1e-5, rtol=0)
    best = expected.topk(2).values
    torch.testing.assert_close(scores.values[:, 1:].double(), best, atol=1e-5, rtol=0)
    ranks = [int((row >= row[token]).sum()) for row, token in zip(logits, tokens, strict=True)]
    assert scores.ranks.tolist() == ranks
    # The same float where the token is the likeliest.
    is_first = scores.ranks == 1
    assert torch.equal(scores.values[is_first, 0], scores.values[is_first, 1])

"""A runner's tokens against a float32 reference, position by position.

The runner decodes by itself; where its token is not the reference's, the score that the reference
gives the two says whether that is rounding or wrong, and the sequence is put back on the
reference's track: it leaves, and joins again in the same blocks with a chunk of one token. So
every position is compared, on decode steps and on mixed ones.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from protocol.columns import pack_int32
from protocol.messages import Join, SamplingParams, StepPlan
from worker.runner import StepRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A prompt and what the reference makes of it."""

    prompt: list[int]
    tokens: list[int]
    """Its greedy continuation."""
    logits: Tensor
    """[tokens, vocab] float32 on the host, from which each token was taken."""


class Comparison(NamedTuple):
    """How far a runner agrees."""

    positions: int
    differing: int
    """Tokens that are not the reference's."""
    worst_gap: float
    """Where a token differs, how much likelier the reference finds its first choice than its
    second, at most: logits."""
    worst_choice: float
    """And how much likelier than the differing token."""


def compare(runner: StepRunner, references: Sequence[Reference], *, max_chunk: int) -> Comparison:
    """Run all references' sequences at once, prompts in chunks of at most `max_chunk` tokens."""
    return _Comparer(runner, references, max_chunk).run()


class _Comparer:
    def __init__(self, runner: StepRunner, references: Sequence[Reference], max_chunk: int) -> None:
        facts = runner.facts
        longest = max(len(r.prompt) + len(r.tokens) for r in references)
        self._blocks_each = -(-longest // facts.block_size)
        assert self._blocks_each * len(references) <= facts.num_blocks, "too few blocks"
        assert len(references) <= facts.slots, "too few slots"
        self._runner = runner
        self._references = references
        self._max_chunk = max_chunk
        self._known = [0] * len(references)
        """Tokens of each reference's continuation that are compared."""
        self._step_id = 0
        self._generation = 0
        self._differing = 0
        self._worst_gap = 0.0
        self._worst_choice = 0.0

    def run(self) -> Comparison:
        total = sum(len(reference.tokens) for reference in self._references)
        strayed = self._prefill()
        while active := [
            i for i, r in enumerate(self._references) if self._known[i] < len(r.tokens)
        ]:
            back = [index for index in active if index in strayed]
            decode = [index for index in active if index not in strayed]
            joins = [self._join(index) for index in back]
            chunks = [(i, len(self._tokens(i)) - 1, 1, 1) for i in back]
            tokens = self._step(leaves=back, joins=joins, decode=decode, chunks=chunks)
            strayed = self._check([*decode, *back], tokens)
        return Comparison(total, self._differing, self._worst_gap, self._worst_choice)

    def _prefill(self) -> set[int]:
        """Compute every prompt, one sequence's chunk a step and all others' decode rows beside."""
        strayed: set[int] = set()
        for index, reference in enumerate(self._references):
            for start in range(0, len(reference.prompt), self._max_chunk):
                count = min(self._max_chunk, len(reference.prompt) - start)
                is_last = start + count == len(reference.prompt)
                joins = [] if start else [self._join(index)]
                tokens = self._step(joins=joins, chunks=[(index, start, count, int(is_last))])
                if is_last:
                    strayed |= self._check([index], tokens)
        return strayed

    def _tokens(self, index: int) -> list[int]:
        reference = self._references[index]
        return reference.prompt + reference.tokens[: self._known[index]]

    def _join(self, index: int) -> Join:
        self._generation += 1
        first = index * self._blocks_each
        return Join(
            slot=index,
            generation=self._generation,
            token_ids=pack_int32(self._tokens(index)),
            prompt_len=len(self._references[index].prompt),
            params=SamplingParams(temperature=0.0, seed=0, max_tokens=1 << 20),
            block_table=pack_int32(range(first, first + self._blocks_each)),
        )

    def _step(
        self,
        *,
        leaves: Sequence[int] = (),
        joins: Sequence[Join] = (),
        decode: Sequence[int] = (),
        chunks: Sequence[tuple[int, int, int, int]] = (),
    ) -> list[int]:
        self._step_id += 1
        plan = StepPlan(
            step_id=self._step_id,
            leaves=pack_int32(leaves),
            joins=list(joins),
            copies=b"",
            new_blocks=b"",
            decode=pack_int32(decode),
            chunks=pack_int32(value for chunk in chunks for value in chunk),
        )
        output = self._runner.launch(plan).output()
        assert (output.counts >= 0).all(), "no row may fail"
        tokens: list[int] = output.tokens.tolist()
        return tokens

    def _check(self, indices: Sequence[int], tokens: Sequence[int]) -> set[int]:
        """Compare a step's tokens; return the sequences that have left the reference's track."""
        strayed = set()
        for index, token in zip(indices, tokens, strict=True):
            reference, position = self._references[index], self._known[index]
            self._known[index] += 1
            if token != reference.tokens[position]:
                scores = reference.logits[position]
                behind = float(scores[reference.tokens[position]] - scores[token])
                self._worst_gap = max(self._worst_gap, top_two_gap(scores))
                self._worst_choice = max(self._worst_choice, behind)
                self._differing += 1
                strayed.add(index)
        return strayed


def compare_model(model: PreTrainedModel, references: Sequence[Reference]) -> Comparison:
    """Let a transformers model choose every token after the reference's own ones before it.

    In the runner's dtype it says how far rounding alone leads.
    """
    differing, positions, worst_gap, worst_choice = 0, 0, 0.0, 0.0
    for reference in references:
        ids = torch.tensor([reference.prompt + reference.tokens[:-1]], device=model.device)
        with torch.inference_mode():
            logits = model(ids).logits[0, len(reference.prompt) - 1 :]
        for scores, chosen, token in zip(
            reference.logits, logits.argmax(-1).tolist(), reference.tokens, strict=True
        ):
            positions += 1
            if chosen != token:
                differing += 1
                worst_gap = max(worst_gap, top_two_gap(scores))
                worst_choice = max(worst_choice, float(scores[token] - scores[chosen]))
    return Comparison(positions, differing, worst_gap, worst_choice)


def top_two_gap(scores: Tensor) -> float:
    """Return how much likelier the reference finds its first choice than its second: logits."""
    first, second = scores.topk(2).values.tolist()
    return float(first - second)


def random_prompts(vocab_size: int, lengths: Sequence[int], *, num_each: int) -> list[list[int]]:
    """Return `num_each` prompts of random tokens of each length."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        for length in lengths
        for _ in range(num_each)
    ]


def text_prompts(
    tokens: Sequence[int], lengths: Sequence[int], *, num_each: int
) -> list[list[int]]:
    """Return `num_each` prompts of each length, cut evenly out of a long text's tokens."""
    room = len(tokens) - max(lengths)
    starts = [room * index // num_each for index in range(num_each)]
    return [[*tokens[start : start + length]] for length in lengths for start in starts]


def make_references(
    model: PreTrainedModel, prompts: Sequence[list[int]], *, num_tokens: int
) -> list[Reference]:
    """Return a transformers model's greedy continuations of prompts.

    Neighbours of equal length are one batch, so that there is no padding.
    """
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    references = []
    for length, group in itertools.groupby(prompts, key=len):
        batch = torch.tensor([*group], device=model.device)
        with torch.inference_mode():
            sequences = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            logits = model(sequences).logits[:, length - 1 : -1].float().cpu()
        for prompt, sequence, scores in zip(
            batch.tolist(), sequences[:, length:].tolist(), logits, strict=True
        ):
            references.append(Reference(prompt=prompt, tokens=sequence, logits=scores))
    return references

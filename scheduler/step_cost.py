"""What a step costs: a sum of four terms, and how it is learned from steps that were timed.

A step reads the weights once, whatever it computes, then multiplies each of its tokens with them;
its decode rows read their contexts' keys and values, and its chunks' tokens attend to theirs.
Linear in all four, so least squares finds the terms: from the totals of whole runs as well as from
single steps.
"""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW = 128
"""Timed steps of a kind that are remembered."""

ENOUGH = 16
"""Timed steps with chunks before anything is predicted."""


FURTHER = 2
"""How many times as many tokens, and as many pairs, as a timed step with chunks had are believed
to cost what the fit says; beyond that it is a guess."""

SURPRISE = 1.25
"""How many times as long as predicted a step takes that makes the fit stale at once."""

PRIOR_WEIGHT = 1e-5
"""Of what was believed before, against that of a timed step."""


class StepWork(NamedTuple):
    """What one step computes."""

    num_tokens: int
    """Decode rows and the tokens of chunks."""
    num_read: int
    """Positions whose keys and values decode rows read."""
    num_pairs: int
    """Pairs of a chunk's token and a position that it attends to."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step as a linear function of its work."""

    step_s: float
    token_s: float
    read_s: float
    pair_s: float

    def seconds(self, work: StepWork) -> float:
        """Return how long the ranks compute."""
        return (
            self.step_s
            + self.token_s * work.num_tokens
            + self.read_s * work.num_read
            + self.pair_s * work.num_pairs
        )

    def chunk_seconds(self, start: int, count: int) -> float:
        """Return how much longer a step is for a chunk of `count` tokens from `start` on."""
        return self.token_s * count + self.pair_s * chunk_pairs(start, count)

    def tokens_within(self, seconds: float, start: int) -> int:
        """Return how many tokens of a chunk from position `start` on can be added in `seconds`.

        A chunk of n tokens has n·start + n·(n + 1)/2 pairs, which makes it a quadratic equation.
        """
        if seconds <= 0:
            return 0
        linear = self.token_s + self.pair_s * (start + 0.5)
        if linear <= 0:
            return 2**31
        if self.pair_s <= 0:
            return int(min(seconds / linear, 2**31))
        root = math.sqrt(linear * linear + 2 * self.pair_s * seconds)
        # The difference of two nearly equal numbers, written so that nothing cancels.
        return int(min(2 * seconds / (linear + root), 2**31))


PAIRS = StepCost(step_s=0.0, token_s=0.0, read_s=0.0, pair_s=1.0)
"""Counts pairs as if they were seconds: what `tokens_within` a number of them."""


def chunk_pairs(start: int, count: int) -> int:
    """Return the pairs of a chunk's `count` tokens from position `start` on."""
    return count * start + count * (count + 1) // 2


def fit(
    totals: NDArray[np.float64],
    seconds: NDArray[np.float64],
    prior: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Return the non-negative coefficients that explain runs best, by relative error.

    `totals`: [runs, terms], each run's sum of every term. `seconds`: [runs]. `prior`: [terms] what
    coefficients are where the runs do not tell, as when two terms always grew together.
    A negative cost has no meaning, so the best of all subsets of terms whose least-squares
    solution has none is taken; with so few terms, trying all is the simple way.
    """
    scaled = totals / seconds[:, None]
    # Terms differ by many orders of magnitude; what is solved should not.
    sizes = np.abs(scaled).max(axis=0)
    sizes[sizes == 0] = 1.0
    scaled = scaled / sizes
    gram, target = scaled.T @ scaled, scaled.sum(axis=0)
    if prior is not None:
        weight = PRIOR_WEIGHT * len(seconds)
        gram = gram + weight * np.eye(len(sizes))
        target = target + weight * prior * sizes
    best, best_error = np.zeros(len(sizes)), math.inf
    for size in range(1, len(sizes) + 1):
        for subset in itertools.combinations(range(len(sizes)), size):
            part, *_ = np.linalg.lstsq(gram[np.ix_(subset, subset)], target[list(subset)])
            # The squared error but for a constant. A term more has to explain something.
            error = -float(target[list(subset)] @ part)
            if (part >= 0).all() and error < best_error - 1e-9:
                best, best_error = np.zeros(len(sizes)), error
                best[list(subset)] = part
    coefficients: NDArray[np.float64] = best / sizes
    return coefficients


class StepCostModel:
    """A step's cost as the newest steps tell it.

    Steps with and without chunks are remembered apart, so that an hour of decoding does not
    make it forget what a prompt costs, and what neither tells stays as it was. The relative error
    is what is made small, so one step that took very much longer, for reasons of its own, says
    little.
    """

    def __init__(self) -> None:
        self._decodes = _Window()
        self._mixed = _Window()
        self._cost: StepCost | None = None
        self._coefficients: NDArray[np.float64] | None = None
        self._most_tokens = 0
        self._most_pairs = 0
        self._is_stale = False

    @property
    def trusted_tokens(self) -> int:
        """Tokens of a step with chunks up to which `current` is to be believed.

        A fit to small steps says little of large ones: so steps grow as their cost is seen to.
        """
        return FURTHER * self._most_tokens

    @property
    def trusted_pairs(self) -> int:
        """The same of the pairs of its chunks."""
        return FURTHER * self._most_pairs

    def observe(self, work: StepWork, seconds: float) -> None:
        """Remember how long a step took."""
        if seconds <= 0:
            return
        if not work.num_pairs:
            self._decodes.add(work, seconds)
            return
        self._mixed.add(work, seconds)
        # A refit costs as much as several steps do, so it waits for news: enough of it, a step
        # larger than any before, or one that took longer than it should have.
        is_news = self._mixed.count % ENOUGH == 0
        if self._cost is not None:
            is_news = is_news or work.num_tokens > self._most_tokens
            is_news = is_news or work.num_pairs > self._most_pairs
            is_news = is_news or seconds > SURPRISE * self._cost.seconds(work)
        self._most_tokens = max(self._most_tokens, work.num_tokens)
        self._most_pairs = max(self._most_pairs, work.num_pairs)
        self._is_stale = self._is_stale or is_news

    def current(self) -> StepCost | None:
        """Return what is known; None before enough steps with chunks have been timed."""
        if self._is_stale:
            works, seconds = zip(self._decodes.rows(), self._mixed.rows(), strict=True)
            self._coefficients = fit(
                np.concatenate(works), np.concatenate(seconds), self._believed(*self._mixed.rows())
            )
            self._cost = StepCost(*self._coefficients.tolist())
            self._is_stale = False
        return self._cost

    def _believed(
        self, works: NDArray[np.float64], seconds: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the last fit. Before the first one tokens are what costs, so that too few are
        taken and not too many."""
        if self._coefficients is None:
            return np.array([0.0, (seconds / works[:, 1]).mean(), 0.0, 0.0])
        return self._coefficients


class _Window:
    """The newest timed steps of a kind."""

    def __init__(self) -> None:
        self.count = 0
        self._works = np.ones((WINDOW, 4))
        self._seconds = np.ones(WINDOW)

    def add(self, work: StepWork, seconds: float) -> None:
        place = self.count % WINDOW
        self._works[place, 1:] = work
        self._seconds[place] = seconds
        self.count += 1

    def rows(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the works, with a one in front, and the seconds."""
        known = min(self.count, WINDOW)
        return self._works[:known], self._seconds[:known]

"""What a step costs on a card: a sum of four terms, fitted to measured runs.

A step reads the weights once, whatever it computes, then multiplies each of its tokens with them;
its decode rows read their contexts' keys and values, and its chunks' tokens attend to theirs.
Linear in all four, which is what makes the fit of whole runs possible: the time of a run is the
same sum over the totals of its steps.
"""

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COSTS = Path(__file__).parent / "costs"
"""The fits that are kept, one file a card and model."""


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
    """Seconds of a step as a linear function of its work, and what the card holds."""

    step_s: float
    token_s: float
    read_s: float
    pair_s: float
    hop_s: float
    """From a plan's sending to its start on an idle rank, and from a step's end to the scheduler's
    knowing it."""
    cache_tokens: int
    """Positions that the KV cache holds."""

    def seconds(self, work: StepWork) -> float:
        """Return how long the card computes."""
        return (
            self.step_s
            + self.token_s * work.num_tokens
            + self.read_s * work.num_read
            + self.pair_s * work.num_pairs
        )

    @classmethod
    def load(cls, name: str) -> "StepCost":
        """Read a kept fit by its name, such as "nvidia-h200-qwen3-0.6b"."""
        return cls(**json.loads((COSTS / f"{name}.json").read_text())["cost"])

    def as_dict(self) -> dict[str, float]:
        """Return the fields, as `load` reads them."""
        return asdict(self)


def fit(totals: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the non-negative coefficients that explain runs best, by relative error.

    `totals`: [runs, terms], each run's sum of every term. `seconds`: [runs]. A negative cost has
    no meaning, so the best of all subsets of terms whose least-squares solution has none is taken;
    with so few terms, trying all is the simple way.
    """
    scaled = totals / seconds[:, None]
    num_terms = totals.shape[1]
    best, best_error = np.zeros(num_terms), float(len(seconds))
    for size in range(1, num_terms + 1):
        for subset in itertools.combinations(range(num_terms), size):
            part, *_ = np.linalg.lstsq(scaled[:, subset], np.ones(len(seconds)), rcond=None)
            error = float(np.square(scaled[:, subset] @ part - 1).sum())
            # A term more has to explain something.
            if (part >= 0).all() and error < best_error - 1e-12:
                best, best_error = np.zeros(num_terms), error
                best[list(subset)] = part
    return best

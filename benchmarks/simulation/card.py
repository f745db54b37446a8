"""A card with a model on it: what its steps cost, as fitted to measured runs, and what it holds."""

import json
from dataclasses import dataclass
from pathlib import Path

from scheduler.step_cost import StepCost

CARDS = Path(__file__).parent / "cards"
"""The fits that are kept, one file a card and model, as `benchmarks.fit_cost` writes them."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a simulation has to know of a replica's hardware."""

    cost: StepCost
    hop_s: float
    """From a plan's sending to its start on an idle rank, and from a step's end to the scheduler's
    knowing it."""
    cache_tokens: int
    """Positions that the KV cache holds."""

    @classmethod
    def load(cls, name: str) -> "Card":
        """Read a kept fit by its name, such as "nvidia-h200-qwen3-0.6b"."""
        card = json.loads((CARDS / f"{name}.json").read_text())["card"]
        return cls(StepCost(**card["cost"]), card["hop_s"], card["cache_tokens"])

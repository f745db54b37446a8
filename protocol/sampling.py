"""How the tokens of a sequence are chosen, once nothing is open any more."""

from typing import NamedTuple

from protocol.messages import SamplingDefaults, SamplingParams


class Sampling(NamedTuple):
    """`SamplingParams`' choice of a token, without what may be left open."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float


NEUTRAL = SamplingDefaults()
"""What this protocol's defaults are: every token, at its own probability."""


def sampling(params: SamplingParams, defaults: SamplingDefaults = NEUTRAL) -> Sampling:
    """Return how to choose tokens: what the parameters give, else what the defaults do."""
    return Sampling(
        temperature=defaults.temperature if params.temperature is None else params.temperature,
        top_k=defaults.top_k if params.top_k is None else params.top_k,
        top_p=defaults.top_p if params.top_p is None else params.top_p,
        min_p=defaults.min_p if params.min_p is None else params.min_p,
        repetition_penalty=(
            defaults.repetition_penalty
            if params.repetition_penalty is None
            else params.repetition_penalty
        ),
    )

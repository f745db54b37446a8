import math
from pathlib import Path

import pytest

from protocol.errors import ModelFileError
from worker.rope_config import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    longrope_attention_factor,
    yarn_attention_factor,
)


def llama3(low: float = 1.0, high: float = 4.0, original: int = 128) -> Llama3Scaling:
    return Llama3Scaling(
        factor=8.0,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def yarn(**changes: float) -> YarnScaling:
    values = {"factor": 4.0, "attention_factor": 1.1, "beta_fast": 32.0, "beta_slow": 1.0} | changes
    return YarnScaling(original_max_position_embeddings=128, **values)


def longrope(short: int = 4, factor: float = 2.0, original: int = 128) -> LongRopeScaling:
    return LongRopeScaling(
        short_factors=(1.0,) * short,
        long_factors=(factor,) * 4,
        original_max_position_embeddings=original,
        attention_factor=1.2,
    )


GOOD: list[RopeScaling | None] = [
    None,
    LinearScaling(factor=2.0),
    DynamicScaling(factor=2.0, original_max_position_embeddings=128),
    llama3(),
    yarn(),
    longrope(),
    FactorScaling(factors=(1.0, 2.0, 4.0, 8.0)),
]


@pytest.mark.parametrize("scaling", GOOD, ids=lambda scaling: type(scaling).__name__)
def test_good_values_are_kept_and_compared(scaling: RopeScaling | None):
    rope = RopeConfig(theta=10_000.0, rotary_dim=8, scaling=scaling)
    rope.check(Path("config.json"), head_dim=16)
    assert {rope: 1}[RopeConfig(theta=10_000.0, rotary_dim=8, scaling=scaling)] == 1


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (RopeConfig(theta=0.0, rotary_dim=8), ["rope_theta is 0.0", "1 to"]),
        (RopeConfig(theta=math.nan, rotary_dim=8), ["rope_theta is nan"]),
        (RopeConfig(theta=1.0, rotary_dim=8, scaling=yarn()), ["rope_theta is 1.0", "above 1"]),
        (RopeConfig(theta=1e4, rotary_dim=7), ["rotary part of a head is 7", "even", "2 to 16"]),
        (RopeConfig(theta=1e4, rotary_dim=0), ["rotary part of a head is 0", "2 to 16"]),
        (RopeConfig(theta=1e4, rotary_dim=18), ["rotary part of a head is 18", "2 to 16"]),
    ],
    ids=str,
)
def test_bad_bases_and_parts(rope: RopeConfig, words: list[str]):
    with pytest.raises(ModelFileError) as error:
        rope.check(Path("config.json"), head_dim=16)
    for word in ["config.json: ", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        (LinearScaling(factor=0.0), ["rope factor is 0.0", "above 0"]),
        (LinearScaling(factor=math.inf), ["rope factor is inf", "finite"]),
        (
            DynamicScaling(factor=2.0, original_max_position_embeddings=0),
            ["rope original_max_position_embeddings is 0", "1 to"],
        ),
        (llama3(low=4.0), ["rope low_freq_factor is 4.0", "below high_freq_factor (4.0)"]),
        (llama3(original=1 << 30), ["rope original_max_position_embeddings", "1 to 16777216"]),
        (yarn(factor=math.nan), ["rope factor is nan"]),
        (yarn(attention_factor=-1.0), ["rope attention_factor is -1.0"]),
        (yarn(beta_slow=33.0), ["rope beta_slow is 33.0", "at most beta_fast (32.0)"]),
        (longrope(short=3), ["number of rope short_factor is 3", "must be 4"]),
        (longrope(factor=0.0), ["rope long_factor is 0.0", "above 0"]),
        (longrope(original=0), ["rope original_max_position_embeddings is 0"]),
        (FactorScaling(factors=(1.0,) * 3), ["number of rope factors is 3", "must be 4"]),
        (FactorScaling(factors=(0.0,) * 4), ["rope factors is 0.0", "above 0"]),
    ],
    ids=str,
)
def test_bad_scalings(scaling: RopeScaling, words: list[str]):
    with pytest.raises(ModelFileError) as error:
        RopeConfig(theta=1e4, rotary_dim=8, scaling=scaling).check(Path("config.json"), 8)
    for word in ["config.json: ", *words]:
        assert word in str(error.value)


def test_a_dynamic_base_needs_two_pairs():
    dynamic = DynamicScaling(factor=2.0, original_max_position_embeddings=128)
    with pytest.raises(ModelFileError, match="rotary part of a head is 2; it must be at least 4"):
        RopeConfig(theta=1e4, rotary_dim=2, scaling=dynamic).check(Path("config.json"), 8)


def test_contexts():
    """What is usual and the longest, of a file that says 128."""
    contexts = {}
    for scaling in [*GOOD, yarn(factor=0.5), yarn(factor=1e300)]:
        rope = RopeConfig(theta=1e4, rotary_dim=8, scaling=scaling)
        contexts[scaling] = (rope.usual_context(128), rope.longest_context(128))
    assert contexts.pop(yarn()) == (512, 512)
    assert contexts.pop(yarn(factor=1e300)) == (1 << 24, 1 << 24)
    assert contexts.pop(GOOD[2]) == (128, 256)
    assert set(contexts.values()) == {(128, 128)}


def test_attention_factors():
    assert yarn_attention_factor(4.0) == pytest.approx(1.1386294361)
    assert yarn_attention_factor(0.5) == 1.0
    # DeepSeek's two multipliers cancel where they are equal.
    assert yarn_attention_factor(40.0, 1.0, 1.0) == 1.0
    assert yarn_attention_factor(40.0, 0.707, 1.0) == pytest.approx(0.9210424)
    assert yarn_attention_factor(40.0, 0.707) == yarn_attention_factor(40.0)
    # Phi-3-mini's, from 4,096 to 131,072.
    assert longrope_attention_factor(32.0, 4096) == pytest.approx(1.1902380714)
    assert longrope_attention_factor(1.0, 4096) == 1.0
    assert longrope_attention_factor(32.0, 0) == 1.0

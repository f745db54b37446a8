from protocol.messages import SamplingDefaults, SamplingParams
from protocol.sampling import Sampling, sampling

DEFAULTS = SamplingDefaults(
    temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1
)


def test_what_is_given_comes_before_the_defaults():
    assert sampling(SamplingParams(), DEFAULTS) == Sampling(0.6, 20, 0.95, 0.1, 1.1)
    # What asks for nothing is given all the same.
    neutral = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert sampling(neutral, DEFAULTS) == Sampling(0.0, 0, 1.0, 0.0, 1.0)
    assert sampling(SamplingParams(top_k=-1), DEFAULTS) == Sampling(0.6, -1, 0.95, 0.1, 1.1)


def test_without_defaults_every_token_keeps_its_probability():
    assert sampling(SamplingParams()) == Sampling(1.0, 0, 1.0, 0.0, 1.0)

"""What the edits of logits are, one token after the other and in float64."""

import math
from collections.abc import Sequence

import numpy as np

from protocol.messages import SamplingParams


def reference_edits(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Return a row's logits as they are to be drawn from, after this much output."""
    repetition = params.repetition_penalty or 1.0
    edited = []
    for token, logit in enumerate(logits):
        value = float(logit) + float(np.float32(params.logit_bias.get(token, 0.0)))
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        value -= params.frequency_penalty * list(output).count(token)
        value -= params.presence_penalty * (token in output)
        if is_banned(token, params, output) and logit < math.inf:
            value = -math.inf
        edited.append(value)
    return edited


def is_banned(token: int, params: SamplingParams, output: Sequence[int]) -> bool:
    """Return whether a token may not follow this much output."""
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return True
    if len(output) < params.min_tokens and token in params.stop_token_ids:
        return True
    for *beginning, end in params.bad_word_ids:
        if end == token and list(output[len(output) - len(beginning) :]) == beginning:
            return True
    return False

"""Attention sinks by the logarithm of a softmax's sum, for libraries that know no sinks.

A sink is one more logit of a head, which takes weight and gives no value. It makes the sum of
exponentials, e^lse, larger by e^sink, so that every weight without it is too large by the same:

    output · e^lse / (e^lse + e^sink)  =  output · sigmoid(lse - sink)

GPT-OSS has them (arXiv 2508.10925); what they are for: arXiv 2309.17453.
"""

from torch import Tensor


def share_with_sinks_(output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scale `output` [..., heads, head_dim] in place, and return it.

    `lse` [..., heads] float32 is what the softmax divided by, as a natural logarithm; of a row that
    attends to nothing, whose output is 0, it may be infinite. `sinks` are [heads].
    """
    return output.mul_((lse - sinks).sigmoid_().unsqueeze(-1))

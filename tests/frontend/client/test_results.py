"""Outputs become deltas, and deltas a generation."""

import pytest

from frontend.client.results import Delta, GenerationBuilder, read_output
from protocol.columns import pack_float32, pack_int32
from protocol.messages import FinishReason, LogprobColumns, Output, SamplingParams, Usage


def test_an_output_is_read_with_its_logprobs():
    delta = read_output(
        Output(
            request_id=4,
            sample=1,
            first_index=2,
            text="ab",
            token_ids=pack_int32([7, 8]),
            logprobs=LogprobColumns(
                rows=pack_int32([0, 0]),
                positions=pack_int32([9, 10]),
                n=pack_int32([3, 2]),
                ids=pack_int32([7, 5, 7, 8, 5]),
                values=pack_float32([-2.0, -0.5, -2.0, -0.25, -4.0]),
            ),
            finish_reason=FinishReason.LENGTH,
        )
    )
    assert delta == Delta(
        request_id=4,
        sample=1,
        first_index=2,
        text="ab",
        token_ids=[7, 8],
        logprobs=[{7: -2.0, 5: -0.5}, {8: -0.25, 5: -4.0}],
        finish_reason=FinishReason.LENGTH,
    )
    assert list(delta.logprobs[0]) == [7, 5]  # its own token first


def delta(sample, text, token_ids, **fields):
    return Delta(
        request_id=1, sample=sample, first_index=0, text=text, token_ids=token_ids, **fields
    )


def test_samples_are_put_together_apart():
    builder = GenerationBuilder(3, "prompt", 2)
    builder.add(delta(0, "a", [1], logprobs=[{1: -1.0}]))
    builder.add(delta(1, "x", [8]))
    usage = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4)
    params = SamplingParams(seed=8)
    last = {"finish_reason": FinishReason.STOP, "usage": usage, "params": params}
    builder.add(delta(0, "b", [2], logprobs=[{2: -2.0}], **last))
    first, second = builder.build().samples
    assert (first.text, first.token_ids) == ("ab", [1, 2])
    assert (first.logprobs, first.finish_reason) == ([{1: -1.0}, {2: -2.0}], FinishReason.STOP)
    assert (first.params, second.params) == (params, None)
    assert (second.text, second.token_ids, second.logprobs) == ("x", [8], None)
    assert second.finish_reason is None
    builder.add(delta(1, "", [], **last))
    whole = builder.build()
    assert (whole.index, whole.prompt, whole.error) == (3, "prompt", None)
    assert whole.usage == Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=4)
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("ab", [1, 2], FinishReason.STOP)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_nothing_is_an_empty_generation(num_samples):
    empty = GenerationBuilder(0, "prompt", num_samples).build()
    assert [sample.text for sample in empty.samples] == [""] * num_samples
    assert empty.usage == Usage(prompt_tokens=0, completion_tokens=0)


def test_a_prompts_log_probabilities():
    columns = LogprobColumns(
        rows=pack_int32([0, 0]),
        positions=pack_int32([1, 2]),
        n=pack_int32([2, 1]),
        ids=pack_int32([7, 5, 8]),
        values=pack_float32([-2.0, -0.5, -0.25]),
        ranks=pack_int32([2, 1]),
    )
    output = Output(
        request_id=1, sample=0, first_index=0, text="", token_ids=b"", prompt_logprobs=columns
    )
    builder = GenerationBuilder(0, "prompt", 1)
    builder.add(read_output(output))
    builder.add(delta(0, "b", [2]))
    (sample,) = builder.build().samples
    assert sample.prompt_logprobs == [None, {7: -2.0, 5: -0.5}, {8: -0.25}]

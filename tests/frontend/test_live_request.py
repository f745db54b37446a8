from frontend.deltas import DeltaQueue
from frontend.detokenizer import SilentDetokenizer
from frontend.live_request import LiveRequest
from frontend.output_text import OutputText
from frontend.sample import Sample
from protocol.columns import pack_int32
from protocol.messages import AddSequence, FinishReason, SamplingParams, Usage


def make_request(n):
    samples = [
        Sample(
            AddSequence(
                request_id=1, sample=k, prompt_ids=pack_int32([1, 2, 3]), params=SamplingParams()
            ),
            OutputText(SilentDetokenizer(), None, min_tokens=0),
            keeps_stop_token=False,
        )
        for k in range(n)
    ]
    return LiveRequest(1, samples, DeltaQueue(), num_prompt_tokens=3)


def test_it_is_finished_when_every_sample_is():
    request = make_request(2)
    request.samples[0].accept(0, [5], [], FinishReason.LENGTH)
    assert not request.is_finished
    request.samples[1].accept(0, [5, 6], [], FinishReason.STOP)
    assert request.is_finished


def test_the_prompt_is_counted_once():
    request = make_request(2)
    request.samples[0].cached_tokens = 2
    request.samples[1].cached_tokens = 3
    request.samples[0].accept(0, [5], [], 0)
    request.samples[1].accept(0, [5, 6], [], 0)
    assert request.usage() == Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=2)
    assert request.sample_usage(1) == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=3)

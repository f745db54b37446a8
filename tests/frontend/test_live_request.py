from frontend.deltas import DeltaQueue
from frontend.detokenizer import SilentDetokenizer
from frontend.live_request import LiveRequest, least_positions
from frontend.output_text import OutputText
from frontend.sample import Sample
from protocol.columns import pack_int32, pack_int64
from protocol.messages import AddSequence, FinishReason, QueuePositions, SamplingParams, Usage


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


def test_a_position_is_news_if_it_has_changed_until_it_is_admitted():
    request = make_request(1)
    assert request.queue_position is None
    assert [request.move_to(position) for position in (5, 5, 3, 4, 0, 0, 2)] == [
        *(True, False, True, True, True, False, False)
    ]
    assert request.queue_position == 0


def test_the_sample_that_is_admitted_first_counts():
    message = QueuePositions(requests=pack_int64([7, 8, 7, 8]), positions=pack_int32([4, 9, 2, 0]))
    assert least_positions(message) == {7: 2, 8: 0}

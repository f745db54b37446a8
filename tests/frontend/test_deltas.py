import asyncio

from frontend.deltas import DeltaQueue, SampleDelta, TokenLogprobs
from protocol.errors import ErrorCode
from protocol.messages import ErrorInfo, FinishReason


def delta(text, *, request_id=1, sample=0, first_index=0, **fields):
    return SampleDelta(
        request_id=request_id, sample=sample, first_index=first_index, text=text, **fields
    )


def test_what_waits_is_merged_by_sample_in_the_order_of_arrival():
    async def main():
        queue = DeltaQueue()
        entry = TokenLogprobs([5], [-1.0])
        queue.put(delta("a", sample=1, token_ids=[1], logprobs=[entry]))
        queue.put(delta("x", sample=0))
        queue.put(delta("b", sample=1, first_index=1, token_ids=[2, 3], logprobs=[entry, entry]))
        queue.put(delta("y", request_id=2))
        queue.put(delta("", sample=1, first_index=3, finish_reason=FinishReason.STOP))
        return await queue.take()

    deltas = asyncio.run(main())
    assert [(d.request_id, d.sample, d.text) for d in deltas] == [
        (1, 1, "ab"),
        (1, 0, "x"),
        (2, 0, "y"),
    ]
    merged = deltas[0]
    assert (merged.first_index, merged.token_ids, len(merged.logprobs)) == (0, [1, 2, 3], 3)
    assert merged.finish_reason is FinishReason.STOP
    assert [d.is_last for d in deltas] == [True, False, False]


def test_what_was_taken_is_not_merged_with_what_comes():
    async def main():
        queue = DeltaQueue()
        queue.put(delta("a"))
        first = await queue.take()
        queue.put(delta("b"))
        return first, await queue.take()

    first, second = asyncio.run(main())
    assert [d.text for d in first] == ["a"]
    assert [d.text for d in second] == ["b"]


def test_a_reader_waits_until_there_is_news():
    async def main():
        queue = DeltaQueue()
        reader = asyncio.create_task(queue.take())
        await asyncio.sleep(0.01)
        waited = not reader.done()
        queue.put(delta("a"))
        return waited, await reader

    waited, deltas = asyncio.run(main())
    assert waited
    assert len(deltas) == 1


def test_a_nudge_wakes_the_reader_with_nothing():
    async def main():
        queue = DeltaQueue()
        queue.nudge()
        return await queue.take()

    assert asyncio.run(main()) == []


def test_what_is_discarded_does_not_come():
    async def main():
        queue = DeltaQueue()
        queue.put(delta("a"))
        queue.put(delta("b", sample=1))
        queue.discard(1, 0)
        queue.discard(9, 9)
        return await queue.take()

    assert [d.text for d in asyncio.run(main())] == ["b"]


def test_an_error_ends_a_sample():
    error = ErrorInfo(code=ErrorCode.NUMERIC, message="x")
    assert delta("", error=error).is_last
    assert not delta("").is_last


def test_positions_wake_the_reader_and_the_newest_is_kept():
    async def main():
        queue = DeltaQueue()
        queue.put_position(1, 5)
        queue.put_position(2, 6)
        queue.put_position(1, 4)
        return await queue.take(), queue.take_positions(), queue.take_positions()

    assert asyncio.run(main()) == ([], {1: 4, 2: 6}, {})

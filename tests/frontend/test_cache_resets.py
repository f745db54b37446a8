import asyncio

import pytest

from frontend import cache_resets
from frontend.cache_resets import CacheResets
from protocol.errors import ErrorCode, ProcessError, RequestError
from protocol.messages import CacheReset, ResetCache


def ask(resets, count):
    return [asyncio.create_task(resets.ask()) for _ in range(count)]


def test_answers_go_to_who_asked_in_the_order_of_asking():
    async def main():
        sent = []
        resets = CacheResets(sent.append)
        resets.take(CacheReset(blocks_forgotten=9))  # nobody has asked
        asking = ask(resets, 2)
        await asyncio.sleep(0)
        resets.take(CacheReset(blocks_forgotten=5))
        resets.take(CacheReset(blocks_forgotten=0))
        return sent, [await each for each in asking]

    assert asyncio.run(main()) == ([ResetCache(), ResetCache()], [5, 0])


def test_who_waits_no_more_takes_nobody_elses_answer(monkeypatch):
    async def main():
        resets = CacheResets(lambda _: None)
        monkeypatch.setattr(cache_resets, "ANSWER_TIMEOUT_S", 0.01)
        (late,) = ask(resets, 1)
        with pytest.raises(RequestError, match=r"has not answered within 0\.01 s") as caught:
            await late
        monkeypatch.setattr(cache_resets, "ANSWER_TIMEOUT_S", 5)
        (next_one,) = ask(resets, 1)
        await asyncio.sleep(0)
        resets.take(CacheReset(blocks_forgotten=1))
        resets.take(CacheReset(blocks_forgotten=2))
        return caught.value.code, await next_one

    assert asyncio.run(main()) == (ErrorCode.NOT_READY, 2)


def test_a_scheduler_that_has_forgotten_us_is_asked_again_what_is_open():
    async def main():
        sent = []

        def send(message):
            sent.append(message)
            if len(sent) < 3:
                raise ProcessError("It takes no messages.")

        resets = CacheResets(send)
        given_up, waiting = ask(resets, 2)
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        resets.ask_again()
        resets.take(CacheReset(blocks_forgotten=3))
        return len(sent), await waiting

    assert asyncio.run(main()) == (3, 3)

"""Stream many answers at once: python -m examples.async_client ADDRESS_OR_RUN_DIR"""

import asyncio
import signal
import sys

from frontend import AsyncClient, EngineError, SamplingParams

QUESTIONS = ["Why is the sky blue?", "Why is grass green?", "Why is snow white?"]


async def ask(client: AsyncClient, question: str) -> str:
    """Return the answer to one question, for at most ten seconds of it."""
    answer = ""
    chat = [{"role": "user", "content": question}]
    try:
        async with asyncio.timeout(10):
            async for delta in client.stream(chat, SamplingParams(seed=1, max_tokens=40)):
                answer += delta.text
    except TimeoutError:
        answer += " …"  # cancelling the loop has aborted the request
    return answer


async def main(address: str) -> None:
    """Ask all questions at the same time."""
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(*(ask(client, question) for question in QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n    {answer}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.async_client ADDRESS_OR_RUN_DIR")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end in silence behind `| head`
    try:
        asyncio.run(main(sys.argv[1]))
    except EngineError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)

"""OpenAI's own client against the HTTP surface."""

import asyncio

import openai
import pytest

from protocol.errors import ErrorCode

HI = [{"role": "user", "content": "hi"}]
TEXT = "Paris 😀 is the capital of France. 日本語も。"


def with_client(serve, use, **options):
    """Run `use` with a serving frontend and the client, which does not retry."""

    async def main(serving):
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{serving.http.port}/v1",
            api_key="some-key",
            max_retries=0,
        )
        async with client:
            return await use(serving, client)

    return serve(main, **options)


def test_a_streamed_chat_says_what_the_whole_one_says(serve):
    async def use(serving, client):
        serving.will_say(TEXT)
        whole = await client.chat.completions.create(model="smol", messages=HI)
        stream = await client.chat.completions.create(
            model="smol", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        return whole, [chunk async for chunk in stream]

    whole, chunks = with_client(serve, use)
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].finish_reason == "stop"
    *events, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in events) == TEXT
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage == whole.usage
    assert whole.usage.prompt_tokens_details.cached_tokens == 0


def test_completions_with_samples_and_logprobs(serve):
    async def use(serving, client):
        serving.will_say(" of France", end=False)
        arguments = {"model": "smol", "prompt": ["a", "b"], "n": 2, "max_tokens": 2, "logprobs": 1}
        whole = await client.completions.create(**arguments)
        stream = await client.completions.create(**arguments, stream=True)
        return whole, [chunk async for chunk in stream]

    whole, chunks = with_client(serve, use)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    logprobs = {index: [] for index in range(4)}
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        logprobs[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    for choice in whole.choices:
        assert choice.text == texts[choice.index] == " of France"
        assert choice.logprobs.token_logprobs == logprobs[choice.index] == [-0.5, -0.5]
        assert choice.finish_reason == "length"


def test_chat_logprobs(serve):
    async def use(serving, client):
        serving.will_say("Hi!", end=False)
        return await client.chat.completions.create(
            model="smol", messages=HI, max_tokens=2, logprobs=True, top_logprobs=1
        )

    (choice,) = with_client(serve, use).choices
    assert [entry.token for entry in choice.logprobs.content] == ["Hi", "!"]
    assert choice.logprobs.content[0].bytes == [72, 105]
    assert [top.logprob for top in choice.logprobs.content[0].top_logprobs] == [-0.5]


def test_vllms_extra_fields(serve):
    async def use(serving, client):
        serving.will_say("a b c d", end=False)
        extra = {"top_k": 1, "ignore_eos": True, "min_tokens": 2, "repetition_penalty": 1.0}
        await client.chat.completions.create(
            model="smol", messages=HI, max_completion_tokens=3, extra_body=extra
        )
        return serving.scheduler.sequences[0].params

    params = with_client(serve, use)
    assert (params.top_k, params.ignore_eos, params.min_tokens) == (1, True, 2)
    assert params.max_tokens == 3


@pytest.mark.parametrize(
    ("arguments", "error", "code"),
    [
        ({"temperature": 3}, openai.BadRequestError, "invalid_request"),
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"messages": []}, openai.BadRequestError, "invalid_request"),
    ],
)
def test_refusals_become_its_exceptions(serve, arguments, error, code):
    async def use(serving, client):
        with pytest.raises(error) as caught:
            await client.chat.completions.create(**{"model": "smol", "messages": HI, **arguments})
        return caught.value

    caught = with_client(serve, use)
    assert caught.code == code
    assert caught.param == next(iter(arguments))
    assert caught.request_id


def test_an_overloaded_engine_and_one_that_fails_in_a_stream(serve):
    async def use(serving, client):
        serving.scheduler.answer = lambda sequence: serving.scheduler.tokens(
            sequence, [], reason=ErrorCode.OVERLOADED
        )
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="smol", messages=HI)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="smol", messages=HI, stream=True)
        serving.scheduler.answer = None
        while not serving.scheduler._given.empty():
            serving.scheduler._given.get_nowait()
        opening = client.chat.completions.create(model="smol", messages=HI, stream=True)
        opened = asyncio.create_task(opening)
        sequence = await serving.scheduler.next_sequence()
        serving.scheduler.tokens(sequence, serving.encode("Hi"))
        stream = await opened
        first = await anext(stream)
        serving.scheduler.tokens(sequence, [], reason=ErrorCode.NUMERIC)
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
        return first, caught.value

    first, error = with_client(serve, use)
    assert first.choices[0].delta.content == "Hi"
    assert error.code == "numeric_error"


def test_closing_a_stream_ends_its_request(serve):
    from tests.frontend.conftest import until

    async def use(serving, client):
        serving.scheduler.answer = lambda sequence: serving.scheduler.tokens(sequence, [28120])
        stream = await client.chat.completions.create(model="smol", messages=HI, stream=True)
        first = await anext(stream)
        await stream.close()
        await until(lambda: serving.scheduler.aborts)
        return first, serving.engine.num_live_requests

    first, live = with_client(serve, use)
    assert first.choices[0].delta.content == "hello"
    assert live == 0


def test_models(serve):
    async def use(serving, client):
        listed = [model.id async for model in client.models.list()]
        one = await client.models.retrieve("smol")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        return listed, one

    listed, one = with_client(serve, use)
    assert listed == ["smol"]
    assert one.max_model_len == 512


def test_keys(serve):
    from frontend.http.keys import ApiKeys

    async def use(serving, client):
        serving.will_say("ok")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong-key").models.list()
        return await client.models.list()

    assert len(with_client(serve, use, keys=ApiKeys(["some-key"])).data) == 1

"""The routes, over real HTTP, with a scheduler that says what the test wants."""

import json
import time

import pytest

from protocol.columns import unpack_int32
from protocol.messages import PROTOCOL_VERSION, CacheStats, FinishReason, Ping, SamplingDefaults
from tests.frontend.conftest import until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
CACHE = CacheStats(
    lookup_tokens=40,
    cached_tokens=10,
    resumed_lookup_tokens=9,
    resumed_cached_tokens=8,
    shared_blocks=7,
    revived_blocks=6,
    evicted_blocks=5,
    indexed_blocks=4,
    free_blocks=3,
    cached_blocks=2,
    quarantined_blocks=1,
    quarantines=11,
)
TEXT = "The capital of France is Paris. 😀 日本語"


# ------------------------------------------------------------------------------
# Answers


def test_a_chat_answered_whole(serve):
    async def use(serving):
        serving.will_say(TEXT)
        body = {"messages": HI, "model": "smol", "stream": False}
        return await serving.http.request("POST", CHAT, body), serving.scheduler.sequences[0]

    (status, headers, content), sequence = serve(use)
    assert (status, headers["content-type"]) == (200, "application/json")
    answer = json.loads(content)
    output_tokens = answer["usage"]["completion_tokens"]
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "smol",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 31,
            "completion_tokens": output_tokens,
            "total_tokens": 31 + output_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    # The room left, the model's own end token, a seed.
    assert sequence.params.max_tokens == 512 - 31
    assert sequence.params.stop_token_ids == [2]
    assert sequence.params.seed is not None


def test_a_chat_streamed_says_the_same(serve):
    async def use(serving):
        serving.will_say(TEXT)
        return await serving.http.events(CHAT, {"messages": HI})

    *events, done = serve(use)
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert not any("usage" in event for event in events)


def test_an_answer_without_text_still_has_a_role_and_an_end(serve):
    async def use(serving):
        serving.will_say("")
        whole = await serving.http.post(CHAT, {"messages": HI})
        return whole, await serving.http.events(CHAT, {"messages": HI})

    (_, whole), (first, last, done) = serve(use)
    assert whole["choices"][0]["message"]["content"] == ""
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


def test_completions_whole_and_streamed(serve):
    async def use(serving):
        serving.will_say(" is Paris.", end=False)
        body = {"prompt": "The capital of France", "max_tokens": 3}
        return await serving.http.post(COMPLETIONS, body), await serving.http.events(
            COMPLETIONS, body
        )

    (_, whole), (*events, done) = serve(use)
    assert whole["object"] == "text_completion"
    assert whole["id"].startswith("cmpl-")
    assert whole["choices"] == [
        {"index": 0, "text": " is Paris.", "logprobs": None, "finish_reason": "length"}
    ]
    assert whole["usage"]["completion_tokens"] == 3
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"text_completion"}
    assert "".join(event["choices"][0]["text"] for event in events) == " is Paris."
    assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "length"]


def test_a_character_cut_by_the_length_ends_the_text_as_its_decoding_does(serve):
    async def use(serving):
        ids = serving.encode("Hi 👩")[:-1]
        serving.scheduler.answer = lambda sequence: serving.scheduler.say(sequence, ids)
        body = {"prompt": "hello", "max_tokens": len(ids)}
        _, whole = await serving.http.post(COMPLETIONS, body)
        return serving.decode(ids), whole, await serving.http.events(COMPLETIONS, body)

    decoded, whole, (*events, _) = serve(use)
    assert whole["choices"][0]["text"] == decoded == "Hi \ufffd"
    assert "".join(event["choices"][0]["text"] for event in events) == decoded
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_comes_last_without_choices_and_only_if_asked_for(serve, path):
    async def use(serving):
        serving.will_say("Paris is nice.", end=False)
        body = {"messages": HI, "prompt": "hi", "max_tokens": 4}
        asked = {**body, "stream_options": {"include_usage": True}}
        always = {**body, "stream_options": {"continuous_usage_stats": True}}
        return [await serving.http.events(path, fields) for fields in (body, asked, always)]

    plain, asked, always = serve(use)
    assert not any("usage" in event for event in plain[:-1])
    *events, last, done = asked
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert not any("usage" in event for event in events)
    counts = [event["usage"]["completion_tokens"] for event in always[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert all(event["choices"] for event in always[:-1])


def test_samples_and_prompts_are_numbered_prompt_first(serve):
    async def use(serving):
        def answer(sequence):
            length = len(sequence.prompt_ids) // 4
            serving.scheduler.say(sequence, [*serving.encode(f"{length}/{sequence.sample}"), 2])

        serving.scheduler.answer = answer
        body = {"prompt": [[5], [5, 6], [5, 6, 7]], "n": 2, "seed": 9}
        whole = await serving.http.post(COMPLETIONS, body)
        streamed = await serving.http.events(COMPLETIONS, body)
        return whole, streamed, serving.scheduler.sequences[:6]

    (_, whole), streamed, sequences = serve(use)
    expected = ["1/0", "1/1", "2/0", "2/1", "3/0", "3/1"]
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    texts = [""] * 6
    ends = []
    for event in streamed[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == expected
    assert sorted(ends) == list(range(6))
    assert whole["usage"]["prompt_tokens"] == 6
    seeds = [sequence.params.seed for sequence in sequences]
    assert seeds[0] == seeds[2] == 9
    assert seeds[1] == seeds[3] != 9


@pytest.mark.parametrize("prompt", ["hello there", [28120, 665], ["hello", "there"]])
def test_an_echo_comes_before_the_text(serve, prompt):
    async def use(serving):
        serving.will_say(" you")
        body = {"prompt": prompt, "echo": True}
        whole = await serving.http.post(COMPLETIONS, body)
        streamed = await serving.http.events(COMPLETIONS, body)
        return whole, streamed, serving.decode([28120, 665])

    (_, whole), streamed, decoded = serve(use)
    prompts = prompt if isinstance(prompt[0], str) and isinstance(prompt, list) else [prompt]
    texts = [part if isinstance(part, str) else decoded for part in prompts]
    assert [choice["text"] for choice in whole["choices"]] == [text + " you" for text in texts]
    for index, text in enumerate(texts):
        parts = [
            event["choices"][0]["text"]
            for event in streamed[:-1]
            if event["choices"][0]["index"] == index
        ]
        assert "".join(parts) == text + " you"


def test_stop_strings_across_tokens_are_cut_exactly(serve):
    async def use(serving):
        serving.will_say("One.\n\nUser: two", end=False)
        body = {"messages": HI, "stop": ["\n\nUser:", "never"]}
        whole = await serving.http.post(CHAT, body)
        streamed = await serving.http.events(CHAT, body)
        kept = await serving.http.post(CHAT, {**body, "include_stop_str_in_output": True})
        return whole, streamed, kept, serving.scheduler.aborts

    (_, whole), streamed, (_, kept), aborts = serve(use)
    assert whole["choices"][0]["message"]["content"] == "One."
    assert whole["choices"][0]["finish_reason"] == "stop"
    deltas = [event["choices"][0]["delta"].get("content", "") for event in streamed[:-1]]
    assert "".join(deltas) == "One."
    assert streamed[-2]["choices"][0]["finish_reason"] == "stop"
    assert kept["choices"][0]["message"]["content"] == "One.\n\nUser:"
    assert len(aborts) == 3


def test_special_tokens_are_shown_only_if_asked_for(serve):
    async def use(serving):
        ids = [1, *serving.encode("a"), 2]
        serving.scheduler.answer = lambda sequence: serving.scheduler.say(sequence, ids)
        hidden = await serving.http.post(CHAT, {"messages": HI})
        shown = await serving.http.post(CHAT, {"messages": HI, "skip_special_tokens": False})
        return hidden, shown

    (_, hidden), (_, shown) = serve(use)
    assert hidden["choices"][0]["message"]["content"] == "a"
    # The end token ends the text and is no part of it.
    assert shown["choices"][0]["message"]["content"] == "<|im_start|>a"


def test_logprobs_of_both_endpoints(serve):
    async def use(serving):
        serving.will_say("Hi!", end=False)
        chat = {"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
        completion = {"prompt": "x", "max_tokens": 2, "logprobs": 1}
        return (
            await serving.http.post(CHAT, chat),
            await serving.http.events(CHAT, chat),
            await serving.http.post(COMPLETIONS, completion),
            serving.decode([100]),
        )

    (_, chat), streamed, (_, completion), other = serve(use)
    content = chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hi", "!"]
    assert [entry["bytes"] for entry in content] == [[72, 105], [33]]
    assert content[0]["logprob"] == -0.5
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["Hi", other]
    in_stream = [
        entry
        for event in streamed[:-1]
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert in_stream == content
    assert completion["choices"][0]["logprobs"] == {
        "tokens": ["Hi", "!"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"Hi": -0.5}, {"!": -0.5}],
        "text_offset": [0, 2],
    }


def test_an_echo_with_logprobs_covers_prompt_and_output(serve):
    body = {"prompt": "One, two", "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}

    async def use(serving):
        serving.will_say(" three", end=False)
        whole = await serving.http.post(COMPLETIONS, body)
        streamed = await serving.http.events(COMPLETIONS, body)
        params = serving.scheduler.sequences[0].params
        return whole, streamed, params, serving.decode([200])

    (_, whole), streamed, params, other = serve(use)
    assert (params.prompt_logprobs, params.logprobs) == (1, 1)
    (choice,) = whole["choices"]
    assert "prompt_logprobs" not in choice
    assert choice["text"] == "One, two three"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["One", ",", " two", " three"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.5]
    first, *others = logprobs["top_logprobs"]
    assert first is None
    assert others == [{",": -0.25}, {" two": -0.25}, {" three": -0.5}]
    assert [max(top.values()) for top in others] == logprobs["token_logprobs"][1:]
    assert logprobs["text_offset"] == [0, 3, 4, 8]
    assert streamed[0]["choices"][0]["logprobs"] == logprobs
    assert other


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_log_probabilities_of_the_prompt(serve, path):
    body = {"messages": HI} if path == CHAT else {"prompt": [5, 6, 7]}

    async def use(serving):
        serving.will_say("ok")
        asked = await serving.http.post(path, {**body, "prompt_logprobs": 1})
        plain = await serving.http.post(path, body)
        refused = await serving.http.post(path, {**body, "prompt_logprobs": 1, "stream": True})
        ids = unpack_int32(serving.scheduler.sequences[0].prompt_ids)
        return asked, plain, refused, ids, serving.decode

    (_, asked), (_, plain), (status, refused), ids, decode = serve(use)
    place = (lambda answer: answer) if path == CHAT else (lambda answer: answer["choices"][0])
    assert "prompt_logprobs" not in place(plain)
    first, *others = place(asked)["prompt_logprobs"]
    assert first is None
    assert len(others) == len(ids) - 1
    for position, (token_id, entry) in enumerate(zip(ids[1:], others, strict=True), 1):
        assert entry[str(token_id)] == {
            "logprob": -0.25,
            "rank": 1 + position % 2,
            "decoded_token": decode([token_id], skip_special_tokens=False),
        }
        assert set(entry) == {str(token_id)}
    assert (status, refused["error"]["param"]) == (400, "prompt_logprobs")


def test_a_prompt_is_cut_where_that_is_asked_for(serve):
    async def use(serving):
        serving.will_say("ok")
        long = {"prompt": "one two three " * 900, "truncate_prompt_tokens": -1, "max_tokens": 12}
        short = {"prompt": [5, 6, 7], "truncate_prompt_tokens": 2}
        statuses = [(await serving.http.post(COMPLETIONS, body))[0] for body in (long, short)]
        lengths = [len(each.prompt_ids) // 4 for each in serving.scheduler.sequences]
        return statuses, lengths, serving.scheduler.sequences[1].prompt_ids

    statuses, lengths, kept = serve(use)
    assert (statuses, lengths) == ([200, 200], [500, 2])
    assert unpack_int32(kept) == [6, 7]


def test_tokens_are_called_by_id_where_that_is_asked_for(serve):
    async def use(serving):
        serving.will_say("Hi!", end=False)
        more = {"max_tokens": 1, "return_tokens_as_token_ids": True}
        chat = {"messages": HI, "logprobs": True, "top_logprobs": 2, **more}
        completion = {"prompt": "x", "logprobs": 2, **more}
        return await serving.http.post(CHAT, chat), await serving.http.post(COMPLETIONS, completion)

    (_, chat), (_, completion) = serve(use)
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    (token,) = completion["choices"][0]["logprobs"]["tokens"]
    assert token.startswith("token_id:")
    assert entry["token"] == token
    assert entry["bytes"] == [72, 105]
    assert [top["token"] for top in entry["top_logprobs"]] == [token, "token_id:100"]
    tops = completion["choices"][0]["logprobs"]["top_logprobs"]
    assert tops == [{token: -0.5, "token_id:100": -1.5}]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_parameters_in_effect_where_they_are_asked_for(serve, path):
    body = {"messages": HI} if path == CHAT else {"prompt": "x"}
    body |= {"return_sampling_params": True, "seed": 5, "top_p": 0.5, "min_tokens": 1}
    defaults = SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.1, max_tokens=7)

    async def use(serving):
        serving.will_say("ok")
        whole = await serving.http.post(path, body)
        events = await serving.http.events(path, body)
        plain = await serving.http.post(path, {**body, "return_sampling_params": False})
        return whole[1], events, plain[1]

    whole, events, plain = serve(use, defaults=defaults)
    assert whole["sampling_params"] == {
        "temperature": 0.6,
        "top_p": 0.5,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 5,
        "max_tokens": 7 if path == CHAT else 16,
        "min_tokens": 1,
        "stop_token_ids": [2],
    }
    assert events[0]["sampling_params"] == whole["sampling_params"]
    assert all("sampling_params" not in event for event in events[1:-1])
    assert "sampling_params" not in plain


def test_token_ids_where_they_are_asked_for(serve):
    async def use(serving):
        serving.will_say("Hi!")
        body = {"messages": HI, "return_token_ids": True}
        return await serving.http.post(CHAT, body), await serving.http.events(CHAT, body)

    (_, whole), streamed = serve(use)
    ids = whole["choices"][0]["token_ids"]
    assert ids[-1] == 2
    in_stream = [
        token_id for event in streamed[:-1] for token_id in event["choices"][0].get("token_ids", [])
    ]
    assert in_stream == ids


def test_cached_tokens_are_reported(serve):
    async def use(serving):
        def answer(sequence):
            serving.scheduler.tokens(sequence, [5], cached=16, reason=FinishReason.LENGTH)

        serving.scheduler.answer = answer
        return await serving.http.post(CHAT, {"messages": HI})

    _, answer = serve(use)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_nulls_mean_absent(serve):
    names = (
        "model max_tokens stop temperature seed n stream stream_options logprobs top_logprobs "
        "tools logit_bias response_format user stop_token_ids ignore_eos max_completion_tokens "
        "cache_salt suffix top_k min_p echo presence_penalty frequency_penalty repetition_penalty "
        "allowed_token_ids bad_words"
    )
    nulls = dict.fromkeys(names.split())

    async def use(serving):
        serving.will_say("ok")
        chat = await serving.http.request("POST", CHAT, {"messages": HI, **nulls})
        return chat, await serving.http.post(COMPLETIONS, {"prompt": "x", **nulls})

    (status, headers, content), (other, _) = serve(use)
    assert (status, other) == (200, 200), content
    assert "x-ignored-fields" not in headers


def test_fields_without_effect_are_named(serve):
    async def use(serving):
        serving.will_say("ok")
        body = {"messages": HI, "user": "u", "metadata": {}, "näme": 1, "x" * 100: 2, "top_k": 5}
        return await serving.http.request("POST", CHAT, body)

    status, headers, _ = serve(use)
    assert status == 200
    assert headers["x-ignored-fields"] == "metadata, user, and 2 more"


def test_the_parameters_reach_the_scheduler(serve):
    fields = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "seed": -3,
        "max_tokens": 9,
        "min_tokens": 4,
        "stop": "END",
        "stop_token_ids": [11, 12],
        "ignore_eos": True,
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.25,
        "logit_bias": {"7": 2, "8": -100},
        "allowed_token_ids": [7, 9],
        "bad_words": ["Paris", " Rome", "Paris"],
    }

    async def use(serving):
        serving.will_say("a b c d e f g h i j k l m n o p q r", end=False)
        await serving.http.post(CHAT, {"messages": HI, **fields})
        await serving.http.post(CHAT, {"messages": HI, "max_completion_tokens": 3})
        await serving.http.post(COMPLETIONS, {"prompt": "x"})
        return serving.scheduler.sequences

    first, second, third = (sequence.params for sequence in serve(use))
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.25, 0.5, 7, 0.125)
    assert (first.seed, first.max_tokens, first.min_tokens) == (-3, 9, 4)
    penalties = (first.presence_penalty, first.frequency_penalty, first.repetition_penalty)
    assert penalties == (0.5, -1.0, 1.25)
    assert (first.logit_bias, first.allowed_token_ids) == ({7: 2.0, 8: -100.0}, [7, 9])
    paris, rome = [[38634], [7042]], [[46292], [7268]]
    assert (first.bad_words, first.bad_word_ids) == ([], [*paris, *rome])
    assert (first.stop, first.stop_token_ids, first.ignore_eos) == ([], [11, 12], True)
    assert second.max_tokens == 3
    assert third.max_tokens == 16
    assert second.seed != third.seed


def test_a_request_comes_before_the_models_defaults_and_these_before_the_apis(serve):
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, max_tokens=7)
    null = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "max_tokens"))

    async def use(serving):
        serving.will_say("a")
        await serving.http.post(CHAT, {"messages": HI})
        await serving.http.post(CHAT, {"messages": HI, **null})
        given = {"temperature": 1, "top_k": -1, "top_p": 1, "max_tokens": 2}
        await serving.http.post(CHAT, {"messages": HI, **given})
        await serving.http.post(COMPLETIONS, {"prompt": "x"})
        card = json.loads((await serving.http.request("GET", "/v1/models/smol"))[2])
        return [each.params for each in serving.scheduler.sequences], card["sampling_defaults"]

    chosen, shown = serve(use, defaults=defaults)
    assert [(p.temperature, p.top_k, p.top_p, p.min_p, p.max_tokens) for p in chosen] == [
        (0.6, 20, 0.95, 0.0, 7),
        (0.6, 20, 0.95, 0.0, 7),
        (1.0, -1, 1.0, 0.0, 2),
        (0.6, 20, 0.95, 0.0, 16),
    ]
    assert shown == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 7,
    }


def test_parts_of_a_message_are_joined(serve):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    async def use(serving):
        serving.will_say("ok")
        messages = [
            {"role": "developer", "content": "S"},
            {"role": "user", "content": parts, "name": "n"},
        ]
        await serving.http.post(CHAT, {"messages": messages})
        (sequence,) = serving.scheduler.sequences
        return serving.decode(unpack_int32(sequence.prompt_ids), skip_special_tokens=False)

    assert serve(use) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_salts_and_keys_part_the_prefix_cache(serve):
    from frontend.http.keys import ApiKeys

    async def use(serving):
        serving.will_say("ok")
        for key, salt in [("first-key", None), ("other-key", None), ("first-key", "s")]:
            body = {"prompt": "x", "cache_salt": salt}
            headers = {"Authorization": f"Bearer {key}"}
            status, _, _ = await serving.http.request("POST", COMPLETIONS, body, headers)
            assert status == 200
        return [sequence.cache_domain for sequence in serving.scheduler.sequences]

    domains = serve(use, keys=ApiKeys(["first-key", "other-key"]))
    assert len(set(domains)) == 3
    assert all(len(domain) == 16 for domain in domains)


# ------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [""]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, 400, "prompt"),
        (COMPLETIONS, {}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [1, [2]]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [1.5]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [49152]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [2**40]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 65}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 33, "n": 2}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 512}, 400, "prompt"),
        (COMPLETIONS, {"prompt": "a " * 600}, 400, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 900_000}, 400, "prompt"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 512}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 2**64}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": True}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 17}, 400, "min_tokens"),
        (COMPLETIONS, {"prompt": "x", "temperature": 2.5}, 400, "temperature"),
        (COMPLETIONS, {"prompt": "x", "top_p": 0}, 400, "top_p"),
        (COMPLETIONS, {"prompt": "x", "top_k": -2}, 400, "top_k"),
        (COMPLETIONS, {"prompt": "x", "min_p": 1.5}, 400, "min_p"),
        (COMPLETIONS, {"prompt": "x", "seed": 2**63}, 400, "seed"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, 400, "n"),
        (COMPLETIONS, {"prompt": "x", "n": 65}, 400, "n"),
        (COMPLETIONS, {"prompt": "x", "best_of": 2}, 400, "best_of"),
        (COMPLETIONS, {"prompt": "x", "stop": ""}, 400, "stop"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 5}, 400, "stop"),
        (COMPLETIONS, {"prompt": "x", "stop": "é" * 129}, 400, "stop"),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [49152]}, 400, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [*range(5, 69)]}, 400, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, 400, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        (COMPLETIONS, {"prompt": "x", "echo": True, "truncate_prompt_tokens": 1}, 400, "echo"),
        (
            CHAT,
            {"messages": HI, "spaces_between_special_tokens": False},
            400,
            "spaces_between_special_tokens",
        ),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, 400, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": -1}, 400, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        (COMPLETIONS, {"prompt": "x", "presence_penalty": 2.5}, 400, "presence_penalty"),
        (COMPLETIONS, {"prompt": "x", "frequency_penalty": "1"}, 400, "frequency_penalty"),
        (COMPLETIONS, {"prompt": "x", "repetition_penalty": 0}, 400, "repetition_penalty"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"five": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"-5": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 1, "05": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"49152": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": []}, 400, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [49152]}, 400, "allowed_token_ids"),
        (
            COMPLETIONS,
            {"prompt": "x", "allowed_token_ids": [2], "stop_token_ids": [2], "min_tokens": 1},
            400,
            "allowed_token_ids",
        ),
        (COMPLETIONS, {"prompt": "x", "bad_words": [""]}, 400, "bad_words"),
        (COMPLETIONS, {"prompt": "x", "bad_words": ["a b " * 30]}, 400, "bad_words"),
        (COMPLETIONS, {"prompt": "x", "guided_json": {}}, 400, "guided_json"),
        (COMPLETIONS, {"prompt": "x", "model": "other"}, 404, "model"),
        (COMPLETIONS, {"prompt": "x", "model": "../x" * 1000}, 404, "model"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {}, 400, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [1]}]}, 400, "messages"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            400,
            "messages[0].tool_calls",
        ),
        (CHAT, {"messages": HI, "tools": [{}]}, 400, "tool_choice"),
        (COMPLETIONS, {"prompt": "x", "tools": [{}]}, 400, "tools"),
        (CHAT, {"messages": HI, "add_special_tokens": True}, 400, "add_special_tokens"),
        (
            CHAT,
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            400,
            "add_generation_prompt",
        ),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "json_object"}},
            400,
            "response_format",
        ),
        (CHAT, {"messages": HI, "chat_template": "{% x %}\n"}, 400, "chat_template"),
        (CHAT, {"messages": HI, "top_logprobs": 3}, 400, "top_logprobs"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        (
            CHAT,
            {"messages": HI, "max_tokens": 3, "max_completion_tokens": 4},
            400,
            "max_completion_tokens",
        ),
        (CHAT, {"messages": HI, "cache_salt": ""}, 400, "cache_salt"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_done_is_an_error_object_before_any_event(
    serve, path, body, status, param, stream
):
    async def use(serving):
        answer = await serving.http.request("POST", path, {**body, "stream": stream})
        return answer, serving.scheduler.sequences

    (got, headers, content), sequences = serve(use)
    error = json.loads(content)["error"]
    assert (got, error["param"]) == (status, param), error
    assert headers["content-type"] == "application/json"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert sequences == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0),
        ("logit_bias", {}),
        ("bad_words", []),
        ("tools", []),
        ("tool_choice", "auto"),
        ("response_format", {"type": "text"}),
        ("suffix", ""),
        ("best_of", 1),
        ("chat_template_kwargs", {}),
        ("add_generation_prompt", True),
    ],
)
def test_values_that_ask_for_nothing_are_accepted(serve, field, value):
    async def use(serving):
        serving.will_say("ok")
        return await serving.http.request("POST", CHAT, {"messages": HI, field: value})

    status, headers, _ = serve(use)
    assert status == 200
    assert "x-ignored-fields" not in headers


def test_stream_options_without_a_stream(serve):
    async def use(serving):
        body = {"messages": HI, "stream_options": {"include_usage": True}}
        return await serving.http.post(CHAT, body)

    status, answer = serve(use)
    assert (status, answer["error"]["param"]) == (400, "stream_options")


def test_a_full_frontend_says_when_to_come_again(serve):
    async def use(serving):
        held = await serving.http.open("POST", CHAT, {"messages": HI, "n": 2})
        for _ in range(2):
            await serving.scheduler.next_sequence()
        answer = await serving.http.request("POST", CHAT, {"messages": HI})
        held.close()
        return answer

    status, headers, content = serve(use, max_live_sequences=2)
    error = json.loads(content)["error"]
    assert (status, headers["retry-after"]) == (429, "1")
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")


def test_before_the_engine_is_ready(serve):
    async def use(serving):
        chat = await serving.http.request("POST", CHAT, {"messages": HI})
        health = await serving.http.request("GET", "/health")
        return chat, health, await serving.http.request("GET", "/v1/models")

    (status, headers, content), health, models = serve(use, with_text=False)
    assert (status, headers["retry-after"]) == (503, "1")
    error = json.loads(content)["error"]
    assert error["code"] == "not_ready"
    assert error["message"].startswith("The engine is starting: the ")
    facts = json.loads(health[2])
    assert health[0] == 503
    assert (facts["alive"], facts["ready"]) == (True, False)
    assert facts["reason"].startswith("The engine is starting: the ")
    assert models[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "//health", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
    ],
)
def test_other_paths_and_methods(serve, method, path, status, code):
    async def use(serving):
        return await serving.http.request(method, path)

    got, headers, content = serve(use)
    assert got == status
    assert json.loads(content)["error"]["code"] == code
    assert status != 405 or headers["allow"]


# ------------------------------------------------------------------------------
# The other routes


def test_health_of_a_working_engine(serve):
    async def use(serving):
        held = await serving.http.open("POST", CHAT, {"messages": HI})
        await serving.scheduler.next_sequence()
        serving.scheduler.connection.send(Ping(cache=CACHE))
        await until(lambda: serving.engine.cache)
        answers = [await serving.http.request("GET", path) for path in ("/health", "/ping")]
        held.close()
        return answers

    for status, _, content in serve(use):
        assert status == 200
        assert json.loads(content) == {
            "alive": True,
            "ready": True,
            "progressing": True,
            "reason": None,
            "live_requests": 1,
            "waiting_requests": 0,
            "unacknowledged_aborts": 0,
            "prefix_cache": {
                "hit_rate": 0.25,
                "lookup_tokens": 40,
                "cached_tokens": 10,
                "resumed_lookup_tokens": 9,
                "resumed_cached_tokens": 8,
                "shared_blocks": 7,
                "revived_blocks": 6,
                "evicted_blocks": 5,
                "indexed_blocks": 4,
                "free_blocks": 3,
                "cached_blocks": 2,
                "quarantined_blocks": 1,
                "quarantines": 11,
            },
        }


def test_the_prefix_cache_can_be_reset(serve):
    async def use(serving):
        return await serving.http.request("POST", "/reset_prefix_cache")

    status, _, content = serve(use)
    assert (status, json.loads(content)) == (200, {"blocks_forgotten": 6})


def test_an_engine_that_is_not_ready_resets_nothing(serve):
    async def use(serving):
        return await serving.http.post("/reset_prefix_cache", None)

    status, answer = serve(use, with_text=False)
    assert (status, answer["error"]["code"]) == (503, "not_ready")


def test_health_before_the_scheduler_has_told_of_its_cache(serve):
    async def use(serving):
        return json.loads((await serving.http.request("GET", "/health"))[2])["prefix_cache"]

    assert serve(use) is None


def test_an_engine_that_makes_no_progress_is_not_healthy(serve, monkeypatch):
    monkeypatch.setattr("frontend.engine_client.SILENCE_LIMIT_S", 0.0)

    async def use(serving):
        status, _, content = await serving.http.request("GET", "/health")
        return status, json.loads(content)

    status, facts = serve(use)
    assert (status, facts["ready"], facts["progressing"]) == (503, True, False)
    assert facts["reason"] == "The scheduler does not answer."


def test_models_and_version(serve):
    async def use(serving):
        paths = ("/v1/models", "/v1/models/smol", "/version")
        return [json.loads((await serving.http.request("GET", path))[2]) for path in paths]

    models, model, version = serve(use)
    assert models == {"object": "list", "data": [model]}
    assert model.pop("created") > 1_700_000_000
    assert model == {
        "id": "smol",
        "object": "model",
        "owned_by": "tokenwire",
        "max_model_len": 512,
        "sampling_defaults": {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": None,
        },
    }
    assert version["protocol_version"] == PROTOCOL_VERSION


def test_how_text_becomes_tokens(serve):
    """The bundled model's tokenizer adds nothing to a text, and its template knows no variables."""
    assistant = {"role": "assistant", "content": "Sure <|im_end|>"}

    async def use(serving):
        serving.will_say("ok")
        for body in (
            {"messages": [*HI, assistant], "continue_final_message": True},
            {"messages": HI, "add_generation_prompt": False, "chat_template": "default"},
        ):
            await serving.http.post(CHAT, body)
        text = "<|im_start|>user\nhi<|im_end|>\n"
        await serving.http.post(COMPLETIONS, {"prompt": text, "add_special_tokens": False})
        unknown = await serving.http.post(CHAT, {"messages": HI, "chat_template": "rag"})
        return [unpack_int32(each.prompt_ids) for each in serving.scheduler.sequences], unknown

    (continued, without, text), unknown = serve(use)
    assert continued[-3:-1] != [2, 198]
    assert [i for i in continued if i in (1, 2)] == [1, 2, 1, 2, 1]
    assert [i for i in without if i in (1, 2)] == [1, 2, 1, 2]
    assert [i for i in text if i in (1, 2)] == [1, 2]
    assert unknown[0] == 400
    assert "no chat template 'rag'; chat_template may be default." in unknown[1]["error"]["message"]


def test_tokenizing_over_http(serve):
    async def use(serving):
        return (
            await serving.http.post("/tokenize", {"prompt": "hello <|im_end|>"}),
            await serving.http.post("/detokenize", {"tokens": [28120, 2]}),
            await serving.http.post("/detokenize", {"tokens": [49152]}),
            await serving.http.post("/detokenize", {"tokens": [-1]}),
            json.loads((await serving.http.request("GET", "/tokenizer_info"))[2]),
        )

    (_, ids), text, above, below, info = serve(use)
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", "<|im_start|>")
    assert "add_generation_prompt" in info["chat_template"]
    assert ids["tokens"][0] == 28120
    assert ids["tokens"][-1] == 2
    assert info["chat_templates"] == ["default"]
    assert (ids["count"], ids["max_model_len"]) == (len(ids["tokens"]), 512)
    assert text == (200, {"prompt": "hello<|im_end|>"})
    assert (above[0], below[0]) == (400, 400)


def test_an_internal_error_shows_nothing_of_itself(serve, monkeypatch, caplog):
    async def use(serving):
        async def fail(request):
            raise ValueError("at 0x7f00 in /secret/path")

        monkeypatch.setattr(serving.engine, "prepare", fail)
        return await serving.http.post(CHAT, {"messages": HI})

    status, answer = serve(use)
    assert status == 500
    assert answer["error"] == {
        "message": "An internal error ended the request.",
        "type": "server_error",
        "param": None,
        "code": "internal_server_error",
    }
    assert "ValueError: at 0x7f00" in caplog.text


# ------------------------------------------------------------------------------
# Priority and deadline


def test_priority_and_deadline_reach_the_scheduler_with_every_prompt_and_sample(serve):
    async def use(serving):
        serving.will_say("x")
        before = time.monotonic()
        fields = {"priority": -7, "deadline_s": 2.5, "n": 2}
        await serving.http.post(COMPLETIONS, {"prompt": ["a", "b"], **fields})
        await serving.http.post(CHAT, {"messages": HI, **fields})
        await serving.http.post(CHAT, {"messages": HI, "priority": None, "deadline_s": None})
        return serving.scheduler.sequences, before, time.monotonic()

    sequences, before, after = serve(use)
    assert [sequence.priority for sequence in sequences] == [-7] * 6 + [0]
    *limited, last = [sequence.deadline for sequence in sequences]
    assert last is None
    assert len(set(limited[:4])) == len(set(limited[4:])) == 1
    assert all(before + 2.5 <= deadline <= after + 2.5 for deadline in limited)


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"priority": 2**31}, "priority", "priority is 2147483648; it must be -2147483648 to"),
        ({"priority": -(2**70)}, "priority", "it must be -2147483648 to 2147483647."),
        ({"priority": "high"}, "priority", "priority: Expected `int`, got `str`."),
        ({"priority": 0.5}, "priority", "priority: Expected `int`, got `float`."),
        ({"deadline_s": 0}, "deadline_s", "deadline_s is 0; it must be above 0 and at most"),
        ({"deadline_s": -1.5}, "deadline_s", "deadline_s is -1.5; it must be above 0"),
        ({"deadline_s": 604801}, "deadline_s", "must be above 0 and at most 604800 seconds."),
        ({"deadline_s": "5s"}, "deadline_s", "deadline_s: Expected `float`, got `str`."),
    ],
)
@pytest.mark.parametrize(
    ("path", "prompt"), [(CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "x"})]
)
def test_wrong_priorities_and_deadlines(serve, path, prompt, fields, param, sentence):
    async def use(serving):
        return await serving.http.post(path, {**prompt, **fields}), serving.scheduler.sequences

    (status, answer), sequences = serve(use)
    assert (status, answer["error"]["param"], sequences) == (400, param, [])
    assert sentence in answer["error"]["message"]

import json

import pytest

from frontend.http.keys import ApiKeys

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
KEYS = ApiKeys(["secret-key-1", "secret-key-2"])
PATHS = [
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/smol"),
    ("GET", "/ping"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/nothing"),
    ("OPTIONS", CHAT),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/%68ealth"),
    ("GET", "/health/../v1/models"),
    ("GET", "http://x/v1/models"),
]


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer secret-key-", "Basic secret-key-1", "secret-key-1"],
)
def test_everything_but_health_needs_a_key(serve, authorization):
    async def use(serving):
        headers = {} if authorization is None else {"Authorization": authorization}
        headers["Host"] = "/health"
        return {
            (method, path): await serving.http.request(method, path, None, headers)
            for method, path in PATHS
        }

    for what, (status, headers, content) in serve(use, keys=KEYS).items():
        assert status == 401, what
        assert headers["www-authenticate"] == "Bearer"
        assert json.loads(content)["error"]["code"] == "invalid_api_key"


def test_health_needs_none(serve):
    async def use(serving):
        return await serving.http.request("GET", "/health?x=y")

    assert serve(use, keys=KEYS)[0] == 200


@pytest.mark.parametrize("value", ["Bearer secret-key-1", "bearer  secret-key-2"])
def test_any_of_the_keys_opens(serve, value):
    async def use(serving):
        serving.will_say("ok")
        return await serving.http.post(CHAT, HI, {"Authorization": value})

    assert serve(use, keys=KEYS)[0] == 200


def test_a_key_is_accepted_where_none_is_needed(serve):
    async def use(serving):
        serving.will_say("ok")
        return await serving.http.post(CHAT, HI, {"Authorization": "Bearer anything"})

    assert serve(use)[0] == 200


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ("abc-123_x.y", True),
        ("a" * 64, True),
        ("a" * 65, False),
        ("with space", False),
        ("slash/", False),
        (None, False),
    ],
)
def test_a_plain_request_id_comes_back(serve, given, echoed):
    async def use(serving):
        headers = {} if given is None else {"X-Request-Id": given}
        return [
            (await serving.http.request("GET", path, None, headers))[1]["x-request-id"]
            for path in ("/health", "/nothing")
        ]

    for request_id in serve(use):
        assert (request_id == given) == echoed
        assert 0 < len(request_id) <= 64


def test_a_stream_has_a_request_id_too(serve):
    async def use(serving):
        serving.will_say("ok")
        body = {**HI, "stream": True}
        return await serving.http.request("POST", CHAT, body, {"X-Request-Id": "mine"})

    assert serve(use)[1]["x-request-id"] == "mine"


def test_two_lengths_for_one_body_are_refused(serve):
    async def use(serving):
        return await serving.http.request("GET", "/health", None, {"Transfer-Encoding": "chunked"})

    status, headers, _ = serve(use)
    assert (status, headers["connection"]) == (400, "close")


@pytest.mark.parametrize(
    "headers",
    [{"X": "a" * 40_000}, {f"x-{number}": "y" for number in range(200)}],
    ids=["size", "count"],
)
def test_too_many_headers_are_refused(serve, headers):
    async def use(serving):
        return await serving.http.request("GET", "/health", None, headers)

    assert serve(use)[0] in (400, 431)

import asyncio
import contextlib
import json

import pytest

PATH = "/v1/completions"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": [5]} x',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e400}',
        b"{'prompt': 'x'}",
        b'{"prompt": "x" /* why */}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
        b'{"user": ' + b'{"a":' * 100_000,
        b"\xef\xbb\xbf{}",
        '{"prompt": "x"}'.encode("utf-16"),
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_what_is_no_json_object_is_a_400(serve, raw):
    async def use(serving):
        headers = {"Content-Type": "application/json"}
        return await serving.http.request("POST", PATH, None, headers, raw=raw)

    status, _, content = serve(use)
    error = json.loads(content)["error"]
    assert (status, error["code"]) == (400, "invalid_json"), error
    assert "RecursionError" not in error["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "Application/JSON"}, 200),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Content-Encoding": "identity"}, 200),
    ],
)
def test_types_and_encodings_of_bodies(serve, headers, status):
    async def use(serving):
        serving.will_say("ok")
        return await serving.http.request("POST", PATH, {"prompt": "x"}, headers)

    assert serve(use)[0] == status


def test_a_body_without_a_type_is_taken_for_json(serve):
    async def use(serving):
        serving.will_say("ok")
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.http.port)
        body = b'{"prompt": "x"}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        answer = await reader.read()
        writer.close()
        return answer

    assert serve(use).startswith(b"HTTP/1.1 200")


def test_unusual_text_arrives_exactly(serve):
    text = "nul \x00 😀 \u202e rtl e\u0301 \ufffe \U0010ffff end"

    async def use(serving):
        serving.will_say("!")
        return await serving.http.post(PATH, {"prompt": text, "echo": True})

    status, answer = serve(use)
    assert (status, answer["choices"][0]["text"]) == (200, text + "!")


def test_of_two_equal_names_the_last_counts(serve):
    async def use(serving):
        serving.will_say("ok")
        raw = b'{"prompt": "a", "echo": true, "prompt": "b"}'
        headers = {"Content-Type": "application/json"}
        return await serving.http.request("POST", PATH, None, headers, raw=raw)

    assert json.loads(serve(use)[2])["choices"][0]["text"] == "bok"


def test_a_body_above_the_limit_is_not_read_for_long(serve, monkeypatch):
    monkeypatch.setattr("frontend.http.connection.REFUSED_BODY_S", 0.2)

    async def use(serving):
        declared = await serving.http.request("POST", PATH, {"prompt": "x" * (1 << 20)})
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.http.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        sent = 0
        while not reader.at_eof() and sent < 64 << 20 and not reader._buffer:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            sent += 65536
            await asyncio.sleep(0)
        answer = await reader.readuntil(b"\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                await writer.drain()
        return declared, answer, sent

    (status, _, content), chunked, sent = serve(use)
    assert status == 413
    assert "larger than 1048576 bytes" in json.loads(content)["error"]["message"]
    assert chunked.startswith(b"HTTP/1.1 413")
    assert sent < 32 << 20


def test_a_client_that_sends_all_of_a_too_large_body_reads_the_answer(serve):
    async def use(serving):
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.http.port)
        body = b"x" * (8 << 20)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = await reader.read()
        writer.close()
        return answers

    answers = serve(use)
    assert answers.startswith(b"HTTP/1.1 413")
    assert answers.count(b"HTTP/1.1 200") == 1


def test_a_client_that_asks_first_is_told_before_it_sends(serve):
    async def use(serving):
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.http.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 8388608\r\nExpect: 100-continue\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
        return answer

    assert serve(use).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("limit", ["BODY_TIMEOUT_S", "BODY_PART_TIMEOUT_S"])
def test_a_body_that_comes_too_slowly_is_a_408(serve, monkeypatch, limit):
    monkeypatch.setattr(f"frontend.http.body.{limit}", 0.1)

    async def use(serving):
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.http.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt'
        )
        answer = await reader.read()
        writer.close()
        return answer

    answer = serve(use)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"The body came too slowly." in answer


def test_a_client_that_leaves_before_its_body_ends_does_no_harm(serve, caplog):
    async def use(serving):
        _, writer = await asyncio.open_connection("127.0.0.1", serving.http.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt'
        )
        await asyncio.sleep(0.02)
        writer.close()
        await asyncio.sleep(0.02)
        return await serving.http.request("GET", "/health")

    assert serve(use)[0] == 200
    assert "Traceback" not in caplog.text

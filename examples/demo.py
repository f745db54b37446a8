"""Start Tokenwire with the bundled model, ask one question over HTTP, show the answer, stop.

    python -m examples.demo ["another question"]

Uses the standard library alone, so that it also shows what goes over the wire: a POST to
/v1/chat/completions with "stream": true, and server-sent events back.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

QUESTION = "What is the capital of France, and what is it famous for?"
START_TIMEOUT_S = 120


def main(argv: list[str]) -> int:
    """Run the demo and return its exit code."""
    question = argv[0] if argv else QUESTION
    print("$ python launch.py --port 0", flush=True)
    server = subprocess.Popen(
        [sys.executable, "launch.py", "--port", "0", "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = wait_until_ready(server)
        print(f"\n> {question}\n", flush=True)
        ask(url, question)
    finally:
        server.send_signal(signal.SIGTERM)
        exit_code = server.wait(timeout=30)
    print(f"stopped, exit code {exit_code}", flush=True)
    return exit_code


def wait_until_ready(server: subprocess.Popen[str]) -> str:
    """Return the HTTP address from the server's ready line. Raises SystemExit if none comes."""
    started = time.monotonic()
    assert server.stdout is not None  # noqa: S101 (a pipe, see above)
    for line in server.stdout:
        if line.startswith("ready "):
            print(line, end="", flush=True)
            fields = dict(field.split("=", 1) for field in line.split()[1:])
            return fields["http"]
        if time.monotonic() - started > START_TIMEOUT_S:
            break
    raise SystemExit("The server did not become ready; its log above says why.")


def ask(url: str, question: str) -> None:
    """Stream one answer to the terminal, then print its time to first token and its speed."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 200,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.monotonic()
    first = last = started
    tokens = 0
    for event in post_events(url, "/v1/chat/completions", body):
        for choice in event["choices"]:
            text = choice["delta"].get("content")
            if text:
                last = time.monotonic()
                first = last if first == started else first
                print(text, end="", flush=True)
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    rate = (tokens - 1) / (last - first) if last > first else 0.0
    print(
        f"\n\n{tokens} tokens, {rate:.1f} tokens/s, "
        f"time to first token {(first - started) * 1000:.0f} ms"
    )


def post_events(url: str, path: str, body: dict[str, object]) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of a streaming POST as parsed JSON."""
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=120)
    connection.request(
        "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {response.read().decode()}")
    for line in response:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # behind `| head`; the usual exit would write once more
        os._exit(128 + signal.SIGPIPE)

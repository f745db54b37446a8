"""A running engine for a test: real processes, real sockets, nothing left behind."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90
STOP_TIMEOUT_S = 5.0


def two_free_ports():
    """Return a port that is free and whose next one is too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one, contextlib.suppress(OSError):
            port = one.getsockname()[1]
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


class Engine:
    """`launch.py` with some flags, from its ready line to its end."""

    def __init__(self, *flags, run_dir):
        self.run_dir = run_dir
        self.lines: list[str] = []
        self.log: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "launch.py", "--port", "0", "--run-dir", str(run_dir), *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._ready = threading.Event()
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.lines)),
            threading.Thread(target=self._read, args=(self.process.stderr, self.log)),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, lines):
        for line in stream:
            lines.append(line.rstrip("\n"))
            if line.startswith("ready "):
                self._ready.set()
        if stream is self.process.stdout:
            self._ready.set()

    def wait_until_ready(self):
        """Wait for the ready line and read run.json."""
        assert self._ready.wait(START_TIMEOUT_S), f"not ready: {self.log}"
        assert self.lines, "ended before it was ready:\n" + "\n".join(self.log)
        self.ready_line = self.lines[0]
        fields = dict(field.split("=", 1) for field in self.ready_line.split()[1:])
        self.url, self.client = fields["http"], fields["client"]
        self.seconds = float(fields["seconds"])
        facts = json.loads((self.run_dir / "run.json").read_text())
        self.pids = facts["processes"]
        self.processes = [psutil.Process(self.process.pid)]
        self.processes += self.processes[0].children(recursive=True)
        return self

    def request(self, method, path, body=None, *, raw=None, headers=None):
        """Send one HTTP request; return (status, headers, body parsed as JSON where it is)."""
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.url).netloc, timeout=60)
        try:
            data = json.dumps(body).encode() if raw is None and body is not None else raw
            connection.request(
                method, path, data, {"Content-Type": "application/json", **(headers or {})}
            )
            response = connection.getresponse()
            content = response.read()
            is_json = response.headers.get_content_type() == "application/json"
            return response.status, response.headers, json.loads(content) if is_json else content
        finally:
            connection.close()

    def post(self, path, body):
        """Send a body that must be answered with 200; return the answer."""
        status, _, answer = self.request("POST", path, body)
        assert status == 200, answer
        return answer

    def complete(self, **fields):
        """Return the answer of one non-streaming completion."""
        return self.post("/v1/completions", fields)

    def events(self, path, body):
        """Yield the parsed server-sent events of a streaming POST, up to [DONE]."""
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.url).netloc, timeout=60)
        with contextlib.closing(connection):
            connection.request(
                "POST",
                path,
                json.dumps({**body, "stream": True}),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.headers["content-type"].split(";")[0] == "text/event-stream"
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data and not data.startswith(":"):
                    yield json.loads(data)
            raise AssertionError("the stream ended without [DONE]")

    def wait(self, timeout=STOP_TIMEOUT_S):
        """Wait for the launcher's end; return (exit code, log)."""
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(5)
        self.process.stdout.close()
        self.process.stderr.close()
        return code, "\n".join(self.log)

    def stop(self, number=signal.SIGTERM):
        """Stop the engine by a signal; return (exit code, seconds it took)."""
        started = time.monotonic()
        self.process.send_signal(number)
        code, _ = self.wait(STOP_TIMEOUT_S)
        return code, time.monotonic() - started

    def survivors(self, within_s=2.0):
        """Return the run's processes that are still there after some time."""
        deadline = time.monotonic() + within_s
        while alive := [process for process in self.processes if is_alive(process)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return alive

    def end(self):
        """Leave nothing behind, whatever the test did."""
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        for process in getattr(self, "processes", []):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        if not self.process.stdout.closed:
            self.wait(10)


def is_alive(process):
    """Return whether a process still runs; one that only waits to be reaped does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _short_dir(factory):
    # Unix socket paths hold 107 bytes, and pytest's own directories come close.
    return factory.mktemp("r", numbered=True)


@pytest.fixture
def launch(tmp_path_factory):
    """Return a function that starts an engine with flags and waits until it is ready."""
    engines = []

    def start(*flags, wait=True):
        run_dir = _short_dir(tmp_path_factory)
        engine = Engine(*flags, run_dir=run_dir)
        engines.append(engine)
        return engine.wait_until_ready() if wait else engine

    yield start
    for engine in engines:
        engine.end()


@pytest.fixture(scope="session")
def real_engine(tmp_path_factory):
    """The bundled model, served with its defaults, for all tests that only talk to it."""
    engine = Engine(run_dir=_short_dir(tmp_path_factory)).wait_until_ready()
    yield engine
    code, seconds = engine.stop()
    assert code == 0, engine.log
    assert seconds < STOP_TIMEOUT_S
    assert engine.survivors() == []


@pytest.fixture(scope="session")
def fake_engine(tmp_path_factory):
    """Ranks that hash, with the bundled model's tokenizer."""
    engine = Engine("--fake-workers", run_dir=_short_dir(tmp_path_factory)).wait_until_ready()
    yield engine
    engine.end()


def run_cli(*argv, timeout=60, env=None):
    """Run launch.py to its end; return (exit code, stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, "launch.py", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(env or {})},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def cli():
    """Return a function that runs launch.py to its end."""
    return run_cli

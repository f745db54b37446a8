"""How a run starts, ends, and what it leaves behind: nothing."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import psutil
import pytest

from frontend import Client, SamplingParams
from tests.integration.conftest import ROOT, two_free_ports

FAKE = "--fake-workers"
PROMPT = {"prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True}


def start_stream(engine, max_tokens=4000):
    """Start a long streaming completion in a thread; return the list its events go to."""
    events: list[object] = []

    def read():
        try:
            events.extend(engine.events("/v1/completions", {**PROMPT, "max_tokens": max_tokens}))
            events.append("[DONE]")
        except (OSError, AssertionError) as error:
            events.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return events, thread


def test_the_ready_line_and_run_json_name_the_addresses(launch):
    engine = launch(FAKE)
    assert engine.ready_line.startswith("ready http=http://127.0.0.1:")
    facts = json.loads((engine.run_dir / "run.json").read_text())
    assert facts["http"] == engine.url
    assert facts["clients"] == [engine.client]
    assert set(facts["processes"]) == {"scheduler", "worker-0", "frontend-0"}
    assert engine.lines == [engine.ready_line]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_within_five_seconds(launch, number):
    engine = launch(FAKE)
    code, seconds = engine.stop(number)
    assert code == 0
    assert seconds < 5
    assert engine.survivors() == []


def test_an_open_stream_is_told_why_when_the_engine_stops(launch):
    engine = launch(FAKE, "--drain-timeout", "1", "--max-model-len", "8192")
    events, thread = start_stream(engine, max_tokens=8000)
    while not events and thread.is_alive():
        time.sleep(0.01)
        if engine.request("GET", "/health")[0] == 200:
            break
    time.sleep(0.3)
    code, seconds = engine.stop()
    thread.join(5)
    assert code == 0
    assert seconds < 5
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize("victim", ["scheduler", "worker-0", "frontend-0"])
def test_any_childs_death_ends_the_run_and_names_it(launch, victim):
    engine = launch(FAKE)
    os.kill(engine.pids[victim], signal.SIGKILL)
    code, log = engine.wait(5)
    assert code == 1
    assert f"the run ends because {victim} (pid {engine.pids[victim]}) was killed by SIGKILL" in log
    assert engine.survivors() == []


def test_an_open_stream_is_told_why_when_a_rank_dies(launch):
    engine = launch(FAKE)
    events, thread = start_stream(engine)
    time.sleep(0.3)
    os.kill(engine.pids["worker-0"], signal.SIGKILL)
    code, log = engine.wait(5)
    thread.join(5)
    assert code == 1
    assert "Traceback" not in log
    assert events[-2]["error"]["message"] == "The server stopped before this was finished."
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize("victim", ["scheduler", "worker-0", "frontend-0"])
def test_a_death_while_it_drains_is_told_too(launch, victim):
    engine = launch(FAKE, "--drain-timeout", "30", "--max-model-len", "8192")
    events, thread = start_stream(engine, max_tokens=8000)
    while not events and thread.is_alive():
        time.sleep(0.01)
    engine.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    os.kill(engine.pids[victim], signal.SIGKILL)
    code, log = engine.wait(5)
    thread.join(5)
    assert code == 1
    assert f"the run ends because {victim} (pid {engine.pids[victim]}) was killed by SIGKILL" in log
    assert engine.survivors() == []


@pytest.mark.parametrize("number", ["3", "99999999999999999999"])
def test_a_lifeline_that_is_no_pipe_is_refused(cli, number):
    code, _, err = cli(FAKE, "--port", "0", "--lifeline-fd", number)
    assert code == 2
    assert err == f"launch.py: --lifeline-fd is {number}, which is no open pipe.\n"


@pytest.mark.parametrize("busy", [False, True])
def test_killing_the_launcher_leaves_no_process_after_two_seconds(launch, busy):
    engine = launch(FAKE)
    if busy:
        start_stream(engine)
        time.sleep(0.2)
    os.kill(engine.process.pid, signal.SIGKILL)
    assert engine.survivors(within_s=2.0) == []


def test_killing_the_launcher_while_the_model_loads_leaves_no_process(launch):
    engine = launch(wait=False)
    launcher = psutil.Process(engine.process.pid)
    deadline = time.monotonic() + 20
    while len(launcher.children()) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    engine.processes = [launcher, *launcher.children(recursive=True)]
    assert len(engine.processes) >= 4
    os.kill(engine.process.pid, signal.SIGKILL)
    assert engine.survivors(within_s=2.0) == []


def test_a_text_process_that_dies_is_replaced(launch):
    engine = launch(FAKE)
    frontend = psutil.Process(engine.pids["frontend-0"])
    (text,) = frontend.children()
    text.kill()
    deadline = time.monotonic() + 20
    body = {"prompt": "Hello", "max_tokens": 2}
    while engine.request("POST", "/v1/completions", body)[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert engine.process.poll() is None


def test_a_step_unanswered_ends_the_run_and_names_the_rank(launch):
    engine = launch(FAKE, "--tp", "3", "--step-timeout", "1")
    assert engine.complete(**PROMPT, max_tokens=2)["usage"]["completion_tokens"] == 2
    os.kill(engine.pids["worker-1"], signal.SIGSTOP)
    start_stream(engine)
    code, log = engine.wait(10)
    assert code == 1
    assert "scheduler" in log
    assert "rank 1" in log
    assert engine.survivors() == []


def test_a_stopped_scheduler_shows_in_health_and_ends_the_run(launch):
    engine = launch(FAKE)
    os.kill(engine.pids["scheduler"], signal.SIGSTOP)
    deadline = time.monotonic() + 15
    while engine.request("GET", "/health")[0] == 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    code, log = engine.wait(30)
    assert code == 1
    assert (
        f"the run ends because scheduler (pid {engine.pids['scheduler']}) is stuck: its main loop "
        "has not come round for 20 s."
    ) in log
    assert engine.survivors() == []


def test_a_run_that_is_stopped_as_a_whole_goes_on_as_a_whole(launch):
    engine = launch(FAKE, "--step-timeout", "4")
    events, thread = start_stream(engine, max_tokens=8000)
    while not events:
        assert thread.is_alive()
        time.sleep(0.01)
    for process in engine.processes:
        process.suspend()
    time.sleep(6)
    for process in engine.processes:
        process.resume()
    thread.join(60)
    assert events[-1] == "[DONE]"
    assert engine.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay_s", [0.05, 0.15, 0.3, 0.6])
def test_a_signal_in_the_first_moments_stops_quietly(launch, number, delay_s):
    engine = launch(FAKE, wait=False)
    wait_until_it_catches_signals(engine.process.pid)
    time.sleep(delay_s)
    engine.process.send_signal(number)
    code, log = engine.wait(5)
    assert code == 0
    # It may have been ready by then.
    assert [line for line in engine.lines if not line.startswith("ready ")] == []
    assert "Traceback" not in log


def wait_until_it_catches_signals(pid):
    """Wait until the launcher's first lines have run; before, a signal is Python's."""
    deadline = time.monotonic() + 10
    while True:
        with open(f"/proc/{pid}/status") as file:
            (caught,) = (line for line in file if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGHUP - 1) & 1:
            return
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_matter(tmp_path_factory, closed):
    run_dir = tmp_path_factory.mktemp("c")
    command = f"exec {sys.executable} launch.py {FAKE} --port 0 --run-dir {run_dir} {closed}"
    process = subprocess.Popen(["/bin/sh", "-c", command], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (run_dir / "run.json").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()


def test_a_port_in_use_is_refused_at_once(cli):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = time.monotonic()
        code, out, err = cli(FAKE, "--port", str(port))
    assert code == 2
    assert out == ""
    assert f"--port {port} cannot be used: Address already in use" in err
    assert time.monotonic() - started < 10


def test_four_engines_at_once_all_start(launch):
    engines = [launch(FAKE, wait=False) for _ in range(4)]
    answers = [engine.wait_until_ready().complete(**PROMPT, max_tokens=4) for engine in engines]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert len({engine.url for engine in engines}) == 4


def test_processes_start_by_hand_in_any_order(cli, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("h")
    port = two_free_ports()
    flags = [FAKE, "--frontends", "2", "--port", str(port), "--run-dir", str(run_dir)]
    code, out, _ = cli(*flags, "--print-commands")
    assert code == 0
    make_dir, *lines = out.splitlines()
    assert make_dir == f"mkdir -m 700 -p {run_dir}"
    names = ["scheduler", "worker", "frontend", "frontend"]
    assert [shlex.split(line)[2] for line in lines] == names
    log = tmp_path_factory.mktemp("log") / "log"
    started = []
    try:
        with log.open("wb") as stderr:
            for line in reversed(lines):
                started.append(subprocess.Popen(shlex.split(line), stderr=stderr))
        for index in range(2):
            wait_until_healthy(port + index)
            listens = f"frontend-{index}  listens http=http://127.0.0.1:{port + index}\n"
            assert listens in log.read_text()
            with Client(f"ipc://{run_dir}/clients-{index}") as client:
                params = SamplingParams(max_tokens=2, ignore_eos=True)
                (generation,) = client.generate([1, 2, 3], params)
            assert len(generation.token_ids) == 2
    finally:
        for process in started:
            process.kill()
            process.wait()


def wait_until_healthy(port):
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                assert answer.status == 200
                return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_kernels_are_explained_without_a_start(cli):
    code, out, _ = cli("--device", "cpu", "--dtype", "bfloat16", "--explain-kernels")
    assert code == 0
    head = ["head", "49152", "576", "1-", "library"]
    assert head in [line.split() for line in out.splitlines()]
    code, out, err = cli(FAKE, "--dtype", "nonsense", "--explain-kernels")
    assert (code, out) == (2, "")
    assert "--dtype" in err


def test_without_a_port_every_frontend_by_hand_takes_a_free_one(cli):
    code, out, _ = cli(FAKE, "--frontends", "2", "--port", "0", "--print-commands")
    assert code == 0
    frontends = [shlex.split(line) for line in out.splitlines()[-2:]]
    assert [argv[argv.index("--port") + 1] for argv in frontends] == ["0", "0"]


def test_a_frontend_by_hand_that_finds_no_port_is_refused_before_anything_is_printed(cli):
    code, out, err = cli(FAKE, "--frontends", "2", "--port", "65535", "--print-commands")
    assert (code, out) == (2, "")
    assert "--port is 65536; it must be 0 to 65535." in err


def test_several_frontends_of_a_launcher_share_its_port(launch):
    engine = launch(FAKE, "--frontends", "2")
    for name in ("frontend-0", "frontend-1"):
        assert any(f"{name}  listens http={engine.url}" in line for line in engine.log)
    facts = json.loads((engine.run_dir / "run.json").read_text())
    assert facts["clients"] == [f"ipc://{engine.run_dir}/clients-{index}" for index in range(2)]

"""The launcher: command line to processes, and their life until the end.

It parses the flags once into one config per process, makes the run directory, opens the HTTP
listener before anything loads, starts the processes, waits for their readiness and their death
together, and stops them. It imports neither torch nor transformers and touches no message of the
data path.

Exit codes: 0 asked to stop; 1 the run failed; 2 wrong flags or unusable model files.
"""

import os
import signal
import subprocess
import sys

if __name__ == "__main__":
    # Before the other imports, which take a third of a second. Not by an exception: in the midst
    # of an import it may be swallowed, or crash a C extension that is half made.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: os._exit(0))

import contextlib
import dataclasses
import faulthandler
import json
import logging
import math
import selectors
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from frontend.client_address import client_address
from frontend.config import FrontendConfig
from frontend.http.keys import read_keys
from frontend.http.listener import listener_url, open_listener
from frontend.text.text_model import read_template
from protocol.child import Child, is_pipe, read_available
from protocol.errors import ConfigError, EngineError, ModelFileError, ProcessError
from protocol.flags import parse_flags, to_flags
from protocol.heartbeats import HEARTBEAT_LIMIT_S, LONGEST_WAIT_S, HeartbeatWatch
from protocol.lifecycle import EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, ProcessConfig
from protocol.logs import MAX_MESSAGE_LENGTH, set_up_logging
from protocol.messages import PROTOCOL_VERSION
from protocol.plain_line import plain_line
from protocol.run_dir import ClaimedRunDir, RunDir
from protocol.standard_streams import open_standard_streams
from scheduler.config import (
    MAX_WAITING_REQUESTS,
    MAX_WAITING_TOKENS,
    SchedulerConfig,
    token_budget,
)
from worker.config import KV_CACHE_DTYPES, QUANTIZATIONS, WorkerConfig
from worker.cuda_driver import gpu_memory
from worker.find_model import find_model
from worker.memory_plan import DEFAULT_NUM_SEQS, memory_table
from worker.model_config import ModelConfig
from worker.model_files import read_model_config
from worker.quantization import choose_storage

log = logging.getLogger("launch")

STOP_GRACE_S = 1.5
"""How long a child may take to end by itself once its lifeline is cut."""
STACK_WAIT_S = 1.0
"""How long a stuck child may take to print its stack."""


def flag(
    help_text: str, *choices: str, name: str | None = None
) -> dict[str, str | tuple[str, ...]]:
    """Return a field's metadata for `protocol.flags`."""
    metadata: dict[str, str | tuple[str, ...]] = {"help": help_text}
    if choices:
        metadata["choices"] = choices
    if name:
        metadata["flag"] = name
    return metadata


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """The command line of `launch.py`."""

    model: str = dataclasses.field(
        default="", metadata=flag("model directory, Hub id or GGUF file; empty: the bundled model")
    )
    tp: int = dataclasses.field(default=1, metadata=flag("tensor-parallel ranks, one process each"))
    device: str = dataclasses.field(
        default="auto", metadata=flag("where the ranks compute", "auto", "cuda", "cpu")
    )
    dtype: str = dataclasses.field(
        default="auto",
        metadata=flag(
            "weights and activations; auto: the checkpoint's on CUDA, float32 on CPU",
            *("auto", "bfloat16", "float16", "float32"),
        ),
    )
    quantization: str = dataclasses.field(
        default="auto",
        metadata=flag("weights inside the layers; auto: the checkpoint's", *QUANTIZATIONS),
    )
    kv_cache_dtype: str = dataclasses.field(
        default="auto",
        metadata=flag("keys and values in the KV cache; auto: as --dtype", *KV_CACHE_DTYPES),
    )
    host: str = dataclasses.field(
        default="127.0.0.1", metadata=flag("address of the HTTP endpoint")
    )
    port: int = dataclasses.field(default=8000, metadata=flag("port of it; 0: any free one"))
    listen: str = dataclasses.field(
        default="",
        metadata=flag(
            "tcp://HOST:PORT on loopback for ZeroMQ clients, frontend i at PORT + i; "
            "default: ipc in the run directory"
        ),
    )
    run_dir: str | None = dataclasses.field(
        default=None, metadata=flag("directory for the run's sockets; default: a new private one")
    )
    frontends: int = dataclasses.field(default=1, metadata=flag("frontend processes"))
    max_model_len: int | None = dataclasses.field(
        default=None, metadata=flag("most tokens of prompt and output; default: the model's")
    )
    block_size: int | None = dataclasses.field(
        default=None, metadata=flag("positions a KV block; default: by attention back end")
    )
    num_blocks: int | None = dataclasses.field(
        default=None, metadata=flag("KV blocks a rank; default: what memory allows")
    )
    max_num_seqs: int | None = dataclasses.field(
        default=None, metadata=flag("sequences running at once; default: 256 on CUDA, 64 on CPU")
    )
    max_num_batched_tokens: int | None = dataclasses.field(
        default=None, metadata=flag("token budget of a step; default: by policy, 2048 or 16384")
    )
    gpu_memory_utilization: float = dataclasses.field(
        default=0.9, metadata=flag("share of a GPU's memory to use")
    )
    swap_space_gib: float = dataclasses.field(
        default=0.0,
        metadata=flag(
            "GiB of host memory a rank for preempted sequences' blocks", name="--swap-space"
        ),
    )
    load_format: str = dataclasses.field(
        default="auto",
        metadata=flag("dummy: random weights, only the model's config is read", "auto", "dummy"),
    )
    attention: str = dataclasses.field(
        default="auto",
        metadata=flag("attention back end", "auto", "flash-attn", "fa3", "triton", "torch"),
    )
    enforce_eager: bool = dataclasses.field(default=False, metadata=flag("use no CUDA graphs"))
    policy: str = dataclasses.field(
        default="latency",
        metadata=flag("what a step prefers: short gaps or few steps", "throughput", "latency"),
    )
    itl_target_ms: float | None = dataclasses.field(
        default=None,
        metadata=flag("milliseconds a step with running streams may take, for --policy latency"),
    )
    max_in_flight: int = dataclasses.field(
        default=2, metadata=flag("plans a rank may have unanswered: 1 or 2")
    )
    max_waiting_requests: int = dataclasses.field(
        default=MAX_WAITING_REQUESTS, metadata=flag("sequences that may wait; more are refused")
    )
    max_waiting_tokens: int = dataclasses.field(
        default=MAX_WAITING_TOKENS,
        metadata=flag("their tokens, prompt by prompt; more are refused"),
    )
    prefix_cache: bool = dataclasses.field(
        default=True, metadata=flag("do not reuse the KV blocks of equal prefixes")
    )
    threads: int | None = dataclasses.field(
        default=None, metadata=flag("threads a rank computes with; default: cores / tp, at least 1")
    )
    served_model_name: str = dataclasses.field(
        default="", metadata=flag("name clients use; default: the model's")
    )
    api_key_file: str = dataclasses.field(
        default="",
        metadata=flag("private file with one key a line; requests need one of them then"),
    )
    allow_unauthenticated: bool = dataclasses.field(
        default=False, metadata=flag("let other machines in without a key")
    )
    chat_template: str = dataclasses.field(
        default="", metadata=flag("file of a chat template, instead of the model's")
    )
    ignore_generation_config: bool = dataclasses.field(
        default=False,
        metadata=flag("take no sampling defaults from the model's generation_config.json"),
    )
    seed: int = dataclasses.field(
        default=0, metadata=flag("of dummy weights and of requests that bring none")
    )
    drain_timeout_s: float = dataclasses.field(
        default=2.0,
        metadata=flag("seconds open requests may go on after SIGTERM", name="--drain-timeout"),
    )
    step_timeout_s: float = dataclasses.field(
        default=30.0,
        metadata=flag(
            "seconds a step may take, and again for each 1,024 prompt tokens in it",
            name="--step-timeout",
        ),
    )
    fake_workers: bool = dataclasses.field(
        default=False, metadata=flag("ranks that hash instead of computing; for tests")
    )
    record: str = dataclasses.field(
        default="", metadata=flag("directory that gets a recording of every frame")
    )
    print_commands: bool = dataclasses.field(
        default=False, metadata=flag("print a command per process, for a terminal each, and stop")
    )
    plan: bool = dataclasses.field(
        default=False, metadata=flag("print flags, model config and GPU memory plan, and stop")
    )
    explain_kernels: bool = dataclasses.field(
        default=False, metadata=flag("print which kernel each matrix product will run, and stop")
    )
    log_level: str = dataclasses.field(
        default="info", metadata=flag("least level logged", "debug", "info", "warning", "error")
    )
    lifeline_fd: int = dataclasses.field(
        default=-1, metadata=flag("inherited pipe whose end is a SIGTERM; a parent program sets it")
    )

    def __post_init__(self) -> None:
        at_least = {
            "--tp": (self.tp, 1),
            "--frontends": (self.frontends, 1),
            "--max-model-len": (self.max_model_len, 2),
            "--block-size": (self.block_size, 1),
            "--num-blocks": (self.num_blocks, 1),
            "--max-num-seqs": (self.max_num_seqs, 1),
            "--max-num-batched-tokens": (self.max_num_batched_tokens, 1),
            "--threads": (self.threads, 1),
            "--drain-timeout": (self.drain_timeout_s, 0),
            "--step-timeout": (self.step_timeout_s, 0.1),
        }
        for name, (value, least) in at_least.items():
            if value is not None and not value >= least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}.")
        if self.max_in_flight not in (1, 2):
            raise ConfigError(f"--max-in-flight is {self.max_in_flight}; it must be 1 or 2.")
        if self.lifeline_fd >= 0 and not is_pipe(self.lifeline_fd):
            raise ConfigError(f"--lifeline-fd is {self.lifeline_fd}, which is no open pipe.")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be 0 to 65535.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}; "
                "it must be above 0 and at most 1."
            )


def main(argv: Sequence[str]) -> int:
    """Run Tokenwire from its command line and return the exit code."""
    started = time.monotonic()
    open_standard_streams()
    try:
        config = parse_flags(
            LaunchConfig,
            argv,
            program="launch.py",
            description="Serve a language model: frontends, a scheduler and one worker per rank.",
        )
        set_up_logging("launch", config.log_level)
        faulthandler.register(signal.SIGUSR1)
        config = resolve(config)
        if config.print_commands:
            print_commands(config)
            return EXIT_STOPPED
        if config.plan:
            print(describe(config))
            return EXIT_STOPPED
        if config.explain_kernels:
            command = [*build_commands(config, "")["worker-0"], "--explain-kernels"]
            return subprocess.run(command, cwd=Path(__file__).parent, check=False).returncode
        is_guarded = bool(config.api_key_file) or config.allow_unauthenticated
        listener = open_listener(config.host, config.port, is_guarded=is_guarded)
        with listener, ClaimedRunDir(config.run_dir) as run_dir:
            commands = build_commands(config, run_dir.names.path, listener.fileno())
            return Supervisor(config, run_dir.names, commands, listener, started).run()
    except EngineError as error:
        print(f"launch.py: {plain_line(str(error), MAX_MESSAGE_LENGTH)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError | ModelFileError) else EXIT_FAILED


# ------------------------------------------------------------------------------
# From flags to facts


def resolve(config: LaunchConfig) -> LaunchConfig:
    """Replace what flags leave open by what this machine and model say. Raises ConfigError."""
    model, name = find_model(config.model)
    device = resolve_device(config)
    if model:
        check_model(config, read_model_config(Path(model)))
    return dataclasses.replace(
        config,
        model=model,
        # The processes start elsewhere than where these paths were written.
        record=_absolute(config.record),
        api_key_file=_absolute(config.api_key_file),
        chat_template=_absolute(config.chat_template),
        served_model_name=config.served_model_name or name,
        device=device,
        max_num_batched_tokens=token_budget(config.policy, config.max_num_batched_tokens),
        max_num_seqs=config.max_num_seqs or DEFAULT_NUM_SEQS[device],
    )


def _absolute(path: str) -> str:
    """Return a path as it is from anywhere; empty stays empty."""
    return str(Path(path).expanduser().absolute()) if path else ""


def resolve_device(config: LaunchConfig) -> str:
    """Return "cuda" or "cpu". Raises ConfigError where the GPUs asked for are not there."""
    if config.fake_workers:
        return "cpu" if config.device == "auto" else config.device  # the worker's flags refuse cuda
    if config.device == "cpu":
        return "cpu"
    gpus = len(gpu_memory())
    if config.device == "auto" and gpus == 0:
        return "cpu"
    if gpus == 0:
        raise ConfigError("--device cuda needs a GPU and its driver, and none is found: use cpu.")
    if config.tp > gpus:
        raise ConfigError(f"--tp {config.tp} needs as many GPUs, and there are {gpus}.")
    return "cuda"


def check_model(config: LaunchConfig, model: ModelConfig) -> None:
    """Refuse what the model does not allow, before anything loads. Raises ConfigError."""
    if not config.fake_workers:
        model.require_legal_tp(config.tp)
        choose_storage(config.quantization, model.quantization)
    if config.max_model_len and config.max_model_len > model.longest_context():
        raise ConfigError(
            f"--max-model-len is {config.max_model_len}, and the model was made for at most "
            f"{model.longest_context()} tokens."
        )


# ------------------------------------------------------------------------------
# From facts to processes


def build_commands(
    config: LaunchConfig, run_dir: str, http_fd: int | None = None
) -> dict[str, list[str]]:
    """Return each process's name and command line, in the order they are started.

    All frontends take the listening socket `http_fd`. Without one, which is how they start by
    hand, each opens its own: frontend i at the port + i, unless the port is 0.
    Raises ConfigError for a value that a process would refuse.
    """
    try:
        return _build_commands(config, run_dir, http_fd)
    except ValueError as error:
        raise ConfigError(f"{error}.") from error


def _build_commands(
    config: LaunchConfig, run_dir: str, http_fd: int | None
) -> dict[str, list[str]]:
    process = ProcessConfig(
        run_dir=run_dir, record=config.record, log_level=config.log_level, epoch=1
    )
    scheduler = SchedulerConfig(
        process=process,
        tp=config.tp,
        policy=config.policy,
        max_num_batched_tokens=token_budget(config.policy, config.max_num_batched_tokens),
        itl_target_ms=config.itl_target_ms,
        max_in_flight=config.max_in_flight,
        prefix_cache=config.prefix_cache,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        step_timeout_s=config.step_timeout_s,
    )
    worker = WorkerConfig(
        process=process,
        rank=0,
        tp=config.tp,
        model=config.model,
        device=config.device,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        attention=config.attention,
        load_format=config.load_format,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=token_budget(config.policy, config.max_num_batched_tokens),
        step_timeout_s=config.step_timeout_s,
        gpu_memory_utilization=config.gpu_memory_utilization,
        swap_space_gib=config.swap_space_gib,
        enforce_eager=config.enforce_eager,
        threads=config.threads,
        seed=config.seed,
        fake_workers=config.fake_workers,
    )
    frontend = FrontendConfig(
        process=process,
        model=config.model,
        served_model_name=config.served_model_name,
        host=config.host,
        port=config.port,
        http_fd=-1 if http_fd is None else http_fd,
        listen=config.listen,
        api_key_file=config.api_key_file,
        allow_unauthenticated=config.allow_unauthenticated,
        drain_timeout_s=config.drain_timeout_s,
        chat_template=config.chat_template,
        ignore_generation_config=config.ignore_generation_config,
        seed=config.seed,
    )
    if config.api_key_file:
        read_keys(Path(config.api_key_file))
    if config.chat_template:
        read_template(Path(config.chat_template))
    commands = {"scheduler": ["scheduler", *to_flags(scheduler)]}
    for rank in range(config.tp):
        commands[f"worker-{rank}"] = ["worker", *to_flags(dataclasses.replace(worker, rank=rank))]
    for index in range(config.frontends):
        client_address(config.listen, "", index)  # refused here, before anything starts
        port = config.port + index if config.port and http_fd is None else config.port
        one = dataclasses.replace(frontend, index=index, port=port)
        commands[f"frontend-{index}"] = ["frontend", *to_flags(one)]
    return {name: [sys.executable, "-m", *command] for name, command in commands.items()}


def print_commands(config: LaunchConfig) -> None:
    """Print what starts the same processes by hand, each in a terminal or debugger of its own."""
    run_dir = _absolute(config.run_dir or "/tmp/tokenwire-by-hand")  # noqa: S108 (made private below)
    commands = build_commands(config, run_dir).values()
    for command in (["mkdir", "-m", "700", "-p", run_dir], *commands):
        print(shlex.join(command))


def describe(config: LaunchConfig) -> str:
    """Return the flags, the model's config and what each GPU's memory would go to, as JSON."""
    facts = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    model = read_model_config(Path(config.model))
    described: dict[str, object] = {"run": facts, "model": dataclasses.asdict(model)}
    if config.device == "cuda" and not config.fake_workers:
        described["memory"] = memory_table(
            model,
            tp=config.tp,
            dtype=config.dtype,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            block_size=config.block_size,
            utilization=config.gpu_memory_utilization,
            max_num_batched_tokens=token_budget(config.policy, config.max_num_batched_tokens),
            max_num_seqs=config.max_num_seqs,
            has_graphs=not config.enforce_eager,
            total=min(gpu_memory()),
        )
    return json.dumps(described, indent=2, default=str)


def child_environment() -> dict[str, str]:
    """Return the environment of the children: ours, offline, and on loopback only."""
    return {
        # A thread that waits for another spins for 5 ms by default, which on busy cores keeps the
        # other from running; 0.2 ms bridges the gaps within a step (docs/performance/cpu.md).
        "GOMP_SPINCOUNT": "10000",
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
    }


# ------------------------------------------------------------------------------
# The life of a run


class Supervisor:
    """Starts the processes, watches them, and stops them all when one ends or a signal comes."""

    def __init__(
        self,
        config: LaunchConfig,
        run_dir: RunDir,
        commands: Mapping[str, list[str]],
        listener: socket.socket,
        started: float,
    ) -> None:
        """`commands`: each process's name and command line, in the order they are started."""
        self._config = config
        self._run_dir = run_dir
        self._commands = commands
        self._listener = listener
        self._started = started
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._announced = False
        self._last_words: list[str] = []
        self._signals = 0
        self._heartbeats = HeartbeatWatch(time.monotonic())

    def run(self) -> int:
        """Run until a signal or a child's end, and return the exit code."""
        with self._catch_signals():
            try:
                self._start()
                return self._watch()
            finally:
                self._stop_all()
                # Last, so that it is what is seen.
                for line in self._last_words:
                    print(line, file=sys.stderr)

    def _start(self) -> None:
        http_fd = self._listener.fileno()
        for name, command in self._commands.items():
            child = Child(
                name,
                command,
                directory=str(Path(__file__).parent),
                environment=child_environment(),
                pass_fds=(http_fd,) if name.startswith("frontend") else (),
            )
            self._children.append(child)
            self._selector.register(child.log_fd, selectors.EVENT_READ, child.read_log)
            self._selector.register(child.reports, selectors.EVENT_READ, child.read_reports)
            self._selector.register(child.pidfd, selectors.EVENT_READ, None)

    def _watch(self) -> int:
        """Wait for readiness, death and signals together, until one of them ends the run."""
        deadline: float | None = None
        while True:
            now = time.monotonic()
            left = math.inf if deadline is None else deadline - now
            self._read_pipes(max(0.0, min(left, LONGEST_WAIT_S)))
            if ended := [child for child in self._children if self._has_failed(child)]:
                # One that reports a failure may only have lost one that was killed.
                return self._explain(min(ended, key=lambda child: child.failure is not None))
            if stuck := self._heartbeats.find_stuck(self._watched(), time.monotonic()):
                return self._explain_stuck(stuck)
            if not self._announced and all(child.ready for child in self._children):
                self._announce()
            if self._signals and deadline is None:
                if not self._announced:
                    return EXIT_STOPPED
                deadline = time.monotonic() + self._config.drain_timeout_s + 0.5
                self._drain()
            frontends_open = any(
                child.process.poll() is None and child.name.startswith("frontend")
                for child in self._children
            )
            if deadline is not None and (
                self._signals > 1 or not frontends_open or time.monotonic() >= deadline
            ):
                return EXIT_STOPPED

    def _read_pipes(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            # A pidfd has nothing to read: it wakes this loop once, as does a pipe at its end.
            if key.data is None or not key.data():
                self._selector.unregister(key.fileobj)

    def _announce(self) -> None:
        self._announced = True
        http = listener_url(self._listener)
        clients = [
            child.ready.detail
            for child in self._children
            if child.ready and child.name.startswith("frontend")
        ]
        facts = {
            "protocol_version": PROTOCOL_VERSION,
            "model": self._config.served_model_name,
            "http": http,
            "clients": clients,
            "launcher": os.getpid(),
            "processes": {child.name: child.process.pid for child in self._children},
        }
        try:
            self._run_dir.run_file().write_text(json.dumps(facts, indent=2) + "\n")
        except OSError as error:
            raise ProcessError(
                f"{self._run_dir.run_file()} cannot be written: {error.strerror}."
            ) from error
        seconds = time.monotonic() - self._started
        with contextlib.suppress(OSError):
            print(f"ready http={http} client={clients[0]} seconds={seconds:.1f}", flush=True)

    def _drain(self) -> None:
        """Ask the frontends to finish what they have; they end by themselves."""
        log.info("draining timeout_s=%s", self._config.drain_timeout_s)
        for child in self._children:
            if child.name.startswith("frontend"):
                child.signal(signal.SIGTERM)

    def _explain(self, child: Child) -> int:
        """Say who ended the run and why, and return the exit code that belongs to it."""
        self._read_pipes(0)
        child.read_to_end()
        if child.failure is not None and child.failure.exit_code == EXIT_USAGE:
            sentence = plain_line(child.failure.sentence, MAX_MESSAGE_LENGTH)
            self._last_words = [f"launch.py: {sentence}"]
            return EXIT_USAGE
        self._last_words = [f"launch.py: the run ends because {child.describe_end()}"]
        self._last_words += [f"    {line}" for line in child.log_tail]
        return EXIT_FAILED

    def _watched(self) -> list[Child]:
        """Return the children whose loops never pause; a rank is held to its time step by step."""
        alive = [child for child in self._children if child.process.poll() is None]
        return [child for child in alive if not child.name.startswith("worker")]

    def _has_failed(self, child: Child) -> bool:
        """Whether a child has ended otherwise than asked to, as a signal to all of us asks it."""
        asked = (0, -signal.SIGTERM, -signal.SIGINT) if self._signals else ()
        return child.process.poll() not in (None, *asked)

    def _explain_stuck(self, child: Child) -> int:
        """Say which child is stuck, and where if it still can tell."""
        child.signal(signal.SIGUSR1)  # prints its stack, even in the midst of a library call
        deadline = time.monotonic() + STACK_WAIT_S
        while (left := deadline - time.monotonic()) > 0:
            self._read_pipes(left)
        self._last_words = [
            f"launch.py: the run ends because {child.name} (pid {child.process.pid}) is stuck: its "
            f"main loop has not come round for {HEARTBEAT_LIMIT_S:g} s.",
            *(f"    {line}" for line in child.log_tail),
        ]
        return EXIT_FAILED

    def _stop_all(self) -> None:
        """End every child: first by its lifeline, then by force."""
        for child in self._children:
            child.cut_lifeline()
        deadline = time.monotonic() + STOP_GRACE_S
        while any(child.process.poll() is None for child in self._children):
            left = deadline - time.monotonic()
            if left <= 0 or self._signals > 1:
                for child in self._children:
                    child.signal(signal.SIGKILL)
                break
            self._read_pipes(min(left, 0.1))
        for child in self._children:
            child.process.wait()
            child.read_to_end()
            child.close()

    def _read_lifeline(self) -> bool:
        """Take the end of the program that started this launcher for a signal; False at its end."""
        if os.read(self._config.lifeline_fd, 1):
            return True
        self._signals += 1
        return False

    @contextlib.contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Count stop signals, and let each wake the selector."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)

        def count(_number: int, _frame: object) -> None:
            self._signals += 1

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, count) for number in numbers}
        old_wakeup = signal.set_wakeup_fd(write)
        self._selector.register(read, selectors.EVENT_READ, lambda: bool(read_available(read)))
        if self._config.lifeline_fd >= 0:
            self._selector.register(
                self._config.lifeline_fd, selectors.EVENT_READ, self._read_lifeline
            )
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)


def end_quietly(_number: int, _frame: object) -> None:
    """Stop as asked. Until the run counts signals itself there is nothing to drain."""
    raise SystemExit(EXIT_STOPPED)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_quietly)
    raise SystemExit(main(sys.argv[1:]))

"""An engine of one's own, for offline work."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeAlias

from frontend.client.client import GENERATE_TIMEOUT_S, Client
from frontend.client.engine_process import EngineProcess
from frontend.client.errors import EngineGoneError
from frontend.client.progress import ProgressBar
from frontend.client.requests import Chat, Params, Prompts, list_chats, list_prompts
from frontend.client.results import Generation
from protocol.errors import ErrorCode, RequestError

START_TIMEOUT_S = 600.0

Flag: TypeAlias = str | int | float | bool | None


class LLM:
    """Starts the processes of an engine, generates, and stops them.

        with LLM("Qwen/Qwen3-0.6B") as llm:
            for generation in llm.generate(["One", "Two"], SamplingParams(max_tokens=20)):
                print(generation.text)

    The engine ends with this program at the latest, however it ends. `client` is connected to it,
    for streams and the engine's status; HTTP clients find it on a free port of 127.0.0.1.
    """

    def __init__(
        self,
        model: str | Path = "",
        *,
        tp: int = 1,
        device: Literal["auto", "cuda", "cpu"] = "auto",
        dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
        quantization: Literal["auto", "none", "fp8"] = "auto",
        kv_cache_dtype: Literal["auto", "fp8"] = "auto",
        frontends: int = 1,
        max_model_len: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        swap_space_gib: float = 0.0,
        load_format: Literal["auto", "dummy"] = "auto",
        attention: Literal["auto", "flash-attn", "fa3", "triton", "torch"] = "auto",
        enforce_eager: bool = False,
        policy: Literal["throughput", "latency"] = "throughput",
        itl_target_ms: float | None = None,
        max_in_flight: Literal[1, 2] = 2,
        max_waiting_requests: int = 16_384,
        max_waiting_tokens: int = 8_388_608,
        prefix_cache: bool = True,
        threads: int | None = None,
        served_model_name: str = "",
        api_key_file: str | Path = "",
        chat_template: str | Path = "",
        ignore_generation_config: bool = False,
        seed: int = 0,
        drain_timeout_s: float = 0.0,
        step_timeout_s: float = 30.0,
        fake_workers: bool = False,
        record: str | Path = "",
        log_level: Literal["debug", "info", "warning", "error"] = "warning",
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Start an engine and wait until it is ready.

        The arguments are the flags of `launch.py`, where `--help` explains them, with its defaults
        but for three: `policy` is "throughput", only warnings are logged, and what is open when the
        engine is to stop is not waited for. `model` is a directory, a GGUF file or a Hub id; empty:
        the bundled model.

        Raises ConfigError for what the launcher refuses and ProcessError for a start that fails,
        both with the launcher's own sentence, and EngineTimeoutError after start_timeout_s seconds.
        """
        self._drain_timeout_s = drain_timeout_s
        self._process = EngineProcess(
            command_line(
                {
                    "--model": str(model),
                    "--tp": tp,
                    "--device": device,
                    "--dtype": dtype,
                    "--quantization": quantization,
                    "--kv-cache-dtype": kv_cache_dtype,
                    "--port": 0,
                    "--frontends": frontends,
                    "--max-model-len": max_model_len,
                    "--block-size": block_size,
                    "--num-blocks": num_blocks,
                    "--max-num-seqs": max_num_seqs,
                    "--max-num-batched-tokens": max_num_batched_tokens,
                    "--gpu-memory-utilization": gpu_memory_utilization,
                    "--swap-space": swap_space_gib,
                    "--load-format": load_format,
                    "--attention": attention,
                    "--enforce-eager": enforce_eager,
                    "--policy": policy,
                    "--itl-target-ms": itl_target_ms,
                    "--max-in-flight": max_in_flight,
                    "--max-waiting-requests": max_waiting_requests,
                    "--max-waiting-tokens": max_waiting_tokens,
                    "--no-prefix-cache": not prefix_cache,
                    "--threads": threads,
                    "--served-model-name": served_model_name,
                    "--api-key-file": _absolute(api_key_file),
                    "--chat-template": _absolute(chat_template),
                    "--ignore-generation-config": ignore_generation_config,
                    "--seed": seed,
                    "--drain-timeout": drain_timeout_s,
                    "--step-timeout": step_timeout_s,
                    "--fake-workers": fake_workers,
                    "--record": _absolute(record),
                    "--log-level": log_level,
                }
            )
        )
        try:
            self._process.wait_until_ready(start_timeout_s)
            self.client = Client(self._process.client_address)
        except BaseException:
            self._process.close(drain_timeout_s)
            raise

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        return self._process.pid

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        progress: bool = True,
        on_result: Callable[[Generation], object] | None = None,
        return_errors: bool = False,
        text_options: Mapping[str, object] | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> list[Generation]:
        """Generate from one prompt or many, and return the results in the order of the prompts.

        As `Client.generate`, with a progress bar on stderr unless `progress` is False. An
        EngineGoneError says why the engine ended.
        """
        listed = list_prompts(prompts)
        with ProgressBar(len(listed), is_shown=progress) as bar:

            def count(generation: Generation) -> None:
                bar.count(generation)
                if on_result is not None:
                    on_result(generation)

            try:
                return self.client.generate(
                    listed,
                    params,
                    on_result=count,
                    return_errors=return_errors,
                    text_options=text_options,
                    priority=priority,
                    deadline_s=deadline_s,
                    timeout_s=timeout_s,
                )
            except EngineGoneError as error:
                raise self._explain(error) from error
            except RequestError as error:
                if error.code is not ErrorCode.NOT_READY:
                    raise
                # The engine is ours alone: one that takes nothing any more is about to end.
                gone = EngineGoneError(self.client.address, "has ended")
                raise self._explain(gone) from error

    def chat(
        self,
        chats: Chat | Sequence[Chat],
        params: Params = None,
        *,
        progress: bool = True,
        return_errors: bool = False,
        text_options: Mapping[str, object] | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> list[Generation]:
        """Answer one chat or many: lists of messages, each with a role and content.

        As `generate`, which takes chats too, but refuses all else with a RequestError.
        """
        return self.generate(
            list_chats(chats),
            params,
            progress=progress,
            return_errors=return_errors,
            text_options=text_options,
            priority=priority,
            deadline_s=deadline_s,
            timeout_s=timeout_s,
        )

    def close(self) -> None:
        """Stop the engine and wait until its processes have ended."""
        self.client.close()
        self._process.close(self._drain_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _explain(self, error: EngineGoneError) -> EngineGoneError:
        sentence = self._process.last_sentence()
        if sentence is None:
            return error
        return EngineGoneError(error.address, f"has ended: {sentence.rstrip('.')}")


def command_line(flags: Mapping[str, Flag]) -> list[str]:
    """Return flags as arguments: True is a switch, False and None leave a flag out."""
    arguments = []
    for flag, value in flags.items():
        if value is True:
            arguments.append(flag)
        elif value is not None and value is not False and value != "":
            # One argument each, so that a value beginning with a dash is no flag.
            arguments.append(f"{flag}={value}")
    return arguments


def _absolute(path: str | Path) -> str:
    """Return a path for processes with another working directory; empty stays empty."""
    return str(Path(path).expanduser().absolute()) if path else ""

"""What a frontend is told before it starts. Its flags are these fields."""

from dataclasses import dataclass, field

from protocol.lifecycle import ProcessConfig

MAX_NAME_LENGTH = 256
"""Of the served model, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """Settings of one frontend. What the engine has, it learns from the scheduler's Hello."""

    process: ProcessConfig
    index: int = field(default=0, metadata={"help": "number of this frontend in the run"})
    model: str = field(metadata={"help": "model directory or GGUF file"})
    served_model_name: str = field(default="model", metadata={"help": "name clients use"})
    host: str = field(default="127.0.0.1", metadata={"help": "address of the HTTP endpoint"})
    port: int = field(default=8000, metadata={"help": "port of it; 0: any free one"})
    http_fd: int = field(
        default=-1, metadata={"help": "inherited listening socket, instead of host and port"}
    )
    listen: str = field(
        default="",
        metadata={
            "help": "tcp://HOST:PORT on loopback for ZeroMQ clients; frontend i takes PORT + i"
        },
    )
    api_key_file: str = field(
        default="", metadata={"help": "private file with one key a line; requests need one then"}
    )
    allow_unauthenticated: bool = field(
        default=False, metadata={"help": "let other machines in without a key"}
    )
    drain_timeout_s: float = field(
        default=2.0,
        metadata={
            "help": "seconds open requests may go on after SIGTERM",
            "flag": "--drain-timeout",
        },
    )
    seed: int = field(default=0, metadata={"help": "of the seeds for requests that bring none"})
    max_live_sequences: int = field(
        default=4096, metadata={"help": "sequences at this frontend; more are refused"}
    )
    chat_template: str = field(
        default="", metadata={"help": "file of a chat template, instead of the model's"}
    )
    ignore_generation_config: bool = field(
        default=False,
        metadata={"help": "take no sampling defaults from the model's generation_config.json"},
    )
    tokenizer_cache: str = field(
        default="", metadata={"help": "directory of converted tokenizers; empty: the user's cache"}
    )
    tokenize_timeout_s: float = field(
        default=5.0,
        metadata={"help": "seconds one text may take to tokenize", "flag": "--tokenize-timeout"},
    )
    render_timeout_s: float = field(
        default=2.0,
        metadata={"help": "seconds one chat may take to render", "flag": "--render-timeout"},
    )

    def __post_init__(self) -> None:
        _require_range("--index", self.index, 0, 1023)
        _require_range("--port", self.port, 0, 65535)
        _require_range("--drain-timeout", self.drain_timeout_s, 0, 86_400)
        _require_range("--max-live-sequences", self.max_live_sequences, 1, 2**20)
        _require_range("--tokenize-timeout", self.tokenize_timeout_s, 0.01, 3600)
        _require_range("--render-timeout", self.render_timeout_s, 0.01, 3600)
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"--seed is {self.seed}; it must fit 64 bits: -2^63 to 2^63 - 1")
        _require_name(self.served_model_name)
        if self.listen and self.api_key_file:
            raise ValueError(
                "--listen and --api-key-file exclude each other: keys guard HTTP alone, and any "
                "user of this machine can reach a TCP port; without --listen, ZeroMQ clients use "
                "the socket in the run directory, which is this user's alone"
            )


def _require_range(flag: str, value: float, low: float, high: float) -> None:
    # Written so that NaN, which compares false with everything, is refused too.
    if not low <= value <= high:
        raise ValueError(f"{flag} is {value:.15g}; it must be {low:.15g} to {high:.15g}")


def _require_name(name: str) -> None:
    """Refuse a name that no message could carry; it may also come from the model's path."""
    # Bytes of a command line or a path that are no UTF-8 stand in a str as lone surrogates.
    is_text = not any("\ud800" <= character <= "\udfff" for character in name)
    if not is_text or not 1 <= len(name) <= MAX_NAME_LENGTH:
        shown = repr(name) if len(name) <= 64 else f"{name[:64]!r}…"
        raise ValueError(
            f"--served-model-name is {shown}, of {len(name)} characters; give 1 to "
            f"{MAX_NAME_LENGTH} characters of Unicode text"
        )

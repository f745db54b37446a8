"""What one worker process is told before it starts. Its flags are these fields."""

from dataclasses import dataclass, field

from protocol.lifecycle import ProcessConfig
from protocol.messages import MAX_MODEL_LEN
from worker.faults import Faults

ATTENTION_BACK_ENDS = ("auto", "flash-attn", "fa3", "triton", "torch")
DEVICES = ("auto", "cuda", "cpu")
DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES = ("auto", "fp8")
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("auto", "none", "fp8")
MAX_RANKS = 1024
MAX_SWAP_GIB = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one rank. None means that the worker finds a value and reports it."""

    process: ProcessConfig
    rank: int = field(default=0, metadata={"help": "this worker's place in the group, from 0"})
    tp: int = field(default=1, metadata={"help": "tensor-parallel workers in the group"})
    model: str = field(default="", metadata={"help": "model directory or GGUF file"})
    device: str = field(default="auto", metadata={"help": "where to compute", "choices": DEVICES})
    dtype: str = field(
        default="auto",
        metadata={
            "help": "weights and activations; auto: the checkpoint's on CUDA, float32 on CPU",
            "choices": DTYPES,
        },
    )
    quantization: str = field(
        default="auto",
        metadata={
            "help": "of weights inside the layers; auto: the checkpoint's",
            "choices": QUANTIZATIONS,
        },
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata={
            "help": "of keys and values in the KV cache; auto: as --dtype",
            "choices": KV_CACHE_DTYPES,
        },
    )
    attention: str = field(
        default="auto", metadata={"help": "attention back end", "choices": ATTENTION_BACK_ENDS}
    )
    load_format: str = field(
        default="auto",
        metadata={
            "help": "dummy: random weights, only config.json is read",
            "choices": LOAD_FORMATS,
        },
    )
    block_size: int | None = field(
        default=None, metadata={"help": "token positions a KV block; default: the back end's"}
    )
    num_blocks: int | None = field(
        default=None, metadata={"help": "KV blocks; default: what memory allows"}
    )
    max_num_seqs: int | None = field(
        default=None, metadata={"help": "sequences that run at once; default: 256 on CUDA, else 64"}
    )
    max_num_batched_tokens: int = field(
        default=2048, metadata={"help": "most tokens of a step; memory is set aside for them"}
    )
    max_model_len: int | None = field(
        default=None, metadata={"help": "most tokens of a sequence; default: the model's"}
    )
    step_timeout_s: float = field(
        default=30.0,
        metadata={
            "help": "seconds that ranks wait for each other within a step",
            "flag": "--step-timeout",
        },
    )
    gpu_memory_utilization: float = field(
        default=0.9, metadata={"help": "share of the GPU's memory to use"}
    )
    swap_space_gib: float = field(
        default=0.0,
        metadata={
            "help": "GiB of host memory for preempted sequences' blocks",
            "flag": "--swap-space",
        },
    )
    enforce_eager: bool = field(default=False, metadata={"help": "no CUDA graphs"})
    threads: int | None = field(
        default=None, metadata={"help": "CPU threads; default: cores divided by --tp"}
    )
    seed: int = field(
        default=0, metadata={"help": "of dummy weights, and of random faults in tests"}
    )
    fake_workers: bool = field(
        default=False, metadata={"help": "compute checksums instead of a model; needs no torch"}
    )
    explain_kernels: bool = field(
        default=False, metadata={"help": "print which kernel each product will run, and stop"}
    )
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        if not 1 <= self.tp <= MAX_RANKS:
            raise ValueError(f"--tp {self.tp} must be 1 to {MAX_RANKS}")
        if not 0 <= self.rank < self.tp:
            raise ValueError(f"--rank {self.rank} must be 0 to {self.tp - 1} with --tp {self.tp}")
        if not self.model and not self.fake_workers:
            raise ValueError("--model is required without --fake-workers")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization:g} must be above 0 and at "
                "most 1"
            )
        if not 0.1 <= self.step_timeout_s <= 86_400:
            raise ValueError(f"--step-timeout {self.step_timeout_s:g} must be 0.1 to 86400")
        if not 0 <= self.swap_space_gib <= MAX_SWAP_GIB:
            raise ValueError(f"--swap-space {self.swap_space_gib:g} must be 0 to {MAX_SWAP_GIB}")
        _require_range("--block-size", self.block_size, 1, 65_536)
        _require_range("--num-blocks", self.num_blocks, 1, 2**31 - 2)
        _require_range("--max-num-seqs", self.max_num_seqs, 1, 65_536)
        _require_range("--max-num-batched-tokens", self.max_num_batched_tokens, 1, 2**22)
        _require_range("--max-model-len", self.max_model_len, 1, MAX_MODEL_LEN)
        _require_range("--threads", self.threads, 1, 4096)
        for flag, value, legal in (
            ("--device", self.device, ("auto", "cpu")),
            ("--attention", self.attention, ("auto",)),
            ("--quantization", self.quantization, ("auto", "none")),
            ("--kv-cache-dtype", self.kv_cache_dtype, ("auto",)),
        ):
            if self.fake_workers and value not in legal:
                raise ValueError(
                    f"{flag} {value} does not go with --fake-workers, which compute no model: use "
                    f"{' or '.join(legal)}"
                )
        if self.faults != Faults() and not self.fake_workers:
            raise ValueError("--fault-… flags need --fake-workers")


def _require_range(flag: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ValueError(f"{flag} {value} must be {low} to {high}")

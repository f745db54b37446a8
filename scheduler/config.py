"""What the scheduler process is told before it starts. Its flags are these fields."""

from dataclasses import dataclass, field

from protocol.lifecycle import ProcessConfig
from scheduler.policy import LATENCY_BUDGET, THROUGHPUT_BUDGET

TOKEN_BUDGETS = {"throughput": THROUGHPUT_BUDGET, "latency": LATENCY_BUDGET}
"""Every policy's default."""
MAX_RANKS = 1024
MAX_WAITING_REQUESTS = 16_384
MAX_WAITING_TOKENS = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of the scheduler. What the ranks have, it learns from their Hello."""

    process: ProcessConfig
    tp: int = field(default=1, metadata={"help": "ranks to wait for"})
    policy: str = field(
        default="latency",
        metadata={
            "help": "what a step prefers: short gaps or few steps",
            "choices": tuple(TOKEN_BUDGETS),
        },
    )
    max_num_batched_tokens: int | None = field(
        default=None, metadata={"help": "token budget of a step; default: the policy's"}
    )
    itl_target_ms: float | None = field(
        default=None,
        metadata={"help": "milliseconds a step with running streams may take, by what is measured"},
    )
    max_in_flight: int = field(
        default=2, metadata={"help": "plans the ranks may have unanswered: 1 or 2"}
    )
    prefix_cache: bool = field(
        default=True, metadata={"help": "do not reuse the KV blocks of equal prefixes"}
    )
    step_timeout_s: float = field(
        default=30.0,
        metadata={
            "help": "seconds a step may take, and again for each 1,024 prompt tokens in it",
            "flag": "--step-timeout",
        },
    )
    max_waiting_requests: int = field(
        default=MAX_WAITING_REQUESTS, metadata={"help": "sequences that may wait; more are refused"}
    )
    max_waiting_tokens: int = field(
        default=MAX_WAITING_TOKENS, metadata={"help": "tokens that may wait; more are refused"}
    )

    def __post_init__(self) -> None:
        _require_range("--tp", self.tp, 1, MAX_RANKS)
        _require_range("--max-in-flight", self.max_in_flight, 1, 2)
        if self.max_num_batched_tokens is not None:
            _require_range("--max-num-batched-tokens", self.max_num_batched_tokens, 1, 2**22)
        if self.itl_target_ms is not None:
            _require_range("--itl-target-ms", self.itl_target_ms, 0.1, 60_000)
            if self.policy != "latency":
                raise ValueError("--itl-target-ms needs --policy latency; throughput has no target")
        _require_range("--step-timeout", self.step_timeout_s, 0.1, 86_400)
        _require_range("--max-waiting-requests", self.max_waiting_requests, 1, 2**20)
        _require_range("--max-waiting-tokens", self.max_waiting_tokens, 1, 2**31)


def token_budget(policy: str, max_num_batched_tokens: int | None) -> int:
    """Return the most tokens of a step: what a flag says, or the policy's default."""
    return max_num_batched_tokens or TOKEN_BUDGETS[policy]


def _require_range(flag: str, value: float, low: float, high: float) -> None:
    # Written so that NaN, which compares false with everything, is refused too.
    if not low <= value <= high:
        raise ValueError(f"{flag} is {value:.15g}; it must be {low:.15g} to {high:.15g}")

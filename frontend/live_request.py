"""A request that the scheduler works on: its samples, and where their output goes."""

from frontend.deltas import DeltaQueue
from frontend.sample import Sample
from protocol.columns import unpack_int32, unpack_int64
from protocol.messages import QueuePositions, Usage


def least_positions(message: QueuePositions) -> dict[int, int]:
    """Return the position of each request: that of its sample which is admitted first."""
    least: dict[int, int] = {}
    positions = unpack_int32(message.positions)
    for request_id, position in zip(unpack_int64(message.requests), positions, strict=True):
        least[request_id] = min(position, least.get(request_id, position))
    return least


class LiveRequest:
    """A request from its start until all its samples have ended."""

    def __init__(
        self, request_id: int, samples: list[Sample], queue: DeltaQueue, *, num_prompt_tokens: int
    ) -> None:
        self.request_id = request_id
        self.samples = samples
        self.queue = queue
        self.num_prompt_tokens = num_prompt_tokens
        self.queue_position: int | None = None
        """1: the next to be admitted; 0: admitted, for good; None: not known."""

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.is_finished for sample in self.samples)

    def move_to(self, position: int) -> bool:
        """Take its position in the waiting queue; return whether that is news.

        One that has been admitted stays so, although samples of it may still wait, or wait again.
        """
        if self.queue_position in (0, position):
            return False
        self.queue_position = position
        return True

    def usage(self) -> Usage:
        """Return the tokens taken so far, the prompt's counted once."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=sum(len(sample.output_ids) for sample in self.samples),
            cached_tokens=self.samples[0].cached_tokens,
        )

    def sample_usage(self, sample: int) -> Usage:
        """Return the tokens of the prompt and of one sample."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=len(self.samples[sample].output_ids),
            cached_tokens=self.samples[sample].cached_tokens,
        )

"""A request that the scheduler works on: its samples, and where their output goes."""

from frontend.deltas import DeltaQueue
from frontend.sample import Sample
from protocol.messages import Usage


class LiveRequest:
    """A request from its start until all its samples have ended."""

    def __init__(
        self, request_id: int, samples: list[Sample], queue: DeltaQueue, *, num_prompt_tokens: int
    ) -> None:
        self.request_id = request_id
        self.samples = samples
        self.queue = queue
        self.num_prompt_tokens = num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.is_finished for sample in self.samples)

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

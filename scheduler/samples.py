"""The running samples of each request: who computes the prompt, and who can take it over."""

from scheduler.sequence import RequestKey, Sequence


class Samples:
    """Finds a sequence's siblings, which are the other samples of its request that run."""

    def __init__(self) -> None:
        self._running: dict[RequestKey, dict[Sequence, None]] = {}

    def enter(self, sequence: Sequence) -> None:
        """Note that a sequence runs now."""
        self._running.setdefault(sequence.key.request, {})[sequence] = None

    def leave(self, sequence: Sequence) -> None:
        """Note that a sequence does not run any more; nothing happens if it never was noted."""
        samples = self._running.get(sequence.key.request, {})
        samples.pop(sequence, None)
        if not samples:
            self._running.pop(sequence.key.request, None)

    def find(self, sequence: Sequence) -> Sequence | None:
        """Return a sibling that holds, or will hold, all that the sequence can take over.

        One that has computed it comes before one that is still about to.
        """
        length = length_in_common(sequence)
        expected: Sequence | None = None
        for sibling in self._running.get(sequence.key.request, ()):
            is_computed = sibling.num_computed >= length
            # One that drains may have given up its blocks.
            if not sibling.block_table or (expected is not None and not is_computed):
                continue
            # Nothing but the frontend's word says that samples have the same prompt.
            is_same = (
                sibling.chain.domain == sequence.chain.domain
                and sibling.tokens[:length] == sequence.tokens[:length]
            )
            if is_same and is_computed:
                return sibling
            if is_same:
                expected = sibling
        return expected


def length_in_common(sequence: Sequence) -> int:
    """Return how many tokens a sequence can take over from a sibling: its prompt's.

    At least one token is always left to compute: its logits are what the sequence needs.
    """
    return min(sequence.num_prompt_tokens, len(sequence.tokens) - 1)

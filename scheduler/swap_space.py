"""Room in the ranks' host memory for the blocks of preempted sequences, and when to use it.

A preempted sequence either computes its tokens' keys and values again or has them moved to the
host and back. Every rank has the same host blocks and moves its own share, by the same plans.
"""

from scheduler.step_cost import StepCost


class SwapSpace:
    """Owner of the host blocks. A block is free, or holds a part of one waiting sequence."""

    def __init__(self, num_blocks: int, block_s: float) -> None:
        """`block_s`: seconds that a rank takes to move one block one way."""
        self.num_blocks = num_blocks
        self.block_s = block_s
        self._free = list(range(num_blocks - 1, -1, -1))
        self._outs: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        """Host blocks that hold nothing."""
        return len(self._free)

    def pays(self, num_tokens: int, num_blocks: int, cost: StepCost | None) -> bool:
        """Return whether there is room for blocks whose way out and back is the cheaper one.

        Computing all of `num_tokens` again is the other: what the prefix index may still know when
        the sequence comes back is not foreseen. Without a cost nothing is known to be cheaper.
        """
        if cost is None or not 0 < num_blocks <= len(self._free):
            return False
        return 2 * num_blocks * self.block_s < cost.chunk_seconds(0, num_tokens)

    def move_out(self, blocks: list[int]) -> list[int]:
        """Have the next plan move blocks to the host, for which `pays` has found room.

        Returns the host block of each.
        """
        assert len(blocks) <= len(self._free), f"{len(blocks)} wanted, {len(self._free)} free"
        host_blocks = [self._free.pop() for _ in blocks]
        self._outs += zip(blocks, host_blocks, strict=True)
        return host_blocks

    @property
    def num_outs(self) -> int:
        """Blocks that the next plan moves to the host."""
        return len(self._outs)

    def take_outs(self) -> list[tuple[int, int]]:
        """Return what is moved to the host since the last plan: (block, host block)."""
        outs, self._outs = self._outs, []
        return outs

    def give_back(self, blocks: list[int]) -> None:
        """Take blocks back whose content nobody needs any more once the plans so far have run."""
        self._free.extend(reversed(blocks))

    def audit(self, held: list[list[int]]) -> list[str]:
        """Return a sentence unless what is held and what is free is each block once."""
        listed = sorted([*self._free, *(block for blocks in held for block in blocks)])
        if listed == list(range(self.num_blocks)):
            return []
        return [f"of {self.num_blocks} host blocks {len(listed)} are free or held, or not once"]

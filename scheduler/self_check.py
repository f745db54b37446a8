"""Finds what does not fit together in the scheduler's core, and takes it out of use.

Whatever is found is our bug. A block that it is about goes into quarantine; a sequence that may
have read another's content from it ends alone, and everybody else goes on.
"""

from collections import Counter
from itertools import chain
from typing import NamedTuple

from scheduler.block_books import Finding, Holding
from scheduler.prefix import PrefixHasher
from scheduler.roster import Roster
from scheduler.running import Running
from scheduler.sequence import Sequence
from scheduler.waiting_queue import WaitingQueue

BUSY_INTERVAL_S = 60.0
"""Between two checks of everything while sequences are live."""
REST_INTERVAL_S = 1.0
"""Least time between a check and the next, which an engine gets that has come to rest."""
LEAST_TIMES_APART = 1000
"""A check is at least so many times apart from the next as it takes."""
HASHED_BLOCKS = 1024
"""Blocks whose key a check recomputes. They are other ones each time, until all have been."""


class Repair(NamedTuple):
    """What a check has found and done."""

    problems: list[str]
    """A sentence each."""
    harmed: list[Sequence]
    """Sequences that have to end with an internal error."""


class SelfCheck:
    """Compares what the parts of the core know about each other."""

    def __init__(
        self, running: Running, queue: WaitingQueue, roster: Roster, hasher: PrefixHasher
    ) -> None:
        self._running = running
        self._queue = queue
        self._roster = roster
        self._hasher = hasher
        self._next_hashed = 0

    def audit(self) -> list[str]:
        """Return one sentence for everything that does not fit together; change nothing."""
        sequences = self._running.table.running()
        holdings = [self._holding(each, self._tell(each)) for each in sequences]
        problems = self._running.blocks.audit(self._hasher, holdings)
        return problems + self._problems_of_sequences(sequences)

    def repair(self) -> Repair:
        """Look at everything, and take out of use what an operation or this look has found."""
        blocks, sequences = self._running.blocks, self._running.table.running()
        problems = self._problems_of_sequences(sequences)
        if self._running.is_short:
            self._running.is_short = False
            problems.append("a sequence that was alone found no free block")
        findings = [*blocks.take_stumbles(), *self._find(sequences)]
        problems += dict.fromkeys(finding.sentence for finding in findings)
        foreign = {finding.block for finding in findings if finding.is_foreign}
        if findings:
            held = Counter(chain.from_iterable(each.block_table for each in sequences))
            holders = {finding.block: held[finding.block] for finding in findings}
            blocks.quarantine(holders, self._running.num_admissions)
        harmed: list[Sequence] = []
        for sequence in [*sequences, *self._queue.sequences()]:
            sequence.is_damaged |= not foreign.isdisjoint(sequence.block_table)
            if sequence.is_damaged:
                harmed.append(sequence)
                told = self._tell(sequence)
                problems.append(f"it may have read another's block and ends: {told}")
        return Repair(problems, harmed)

    def _find(self, sequences: list[Sequence]) -> list[Finding]:
        blocks = self._running.blocks
        hashed = range(self._next_hashed, min(self._next_hashed + HASHED_BLOCKS, blocks.num_blocks))
        self._next_hashed = hashed.stop % blocks.num_blocks
        findings = blocks.find_keys(self._hasher, hashed)
        if not blocks.is_sound([self._holding(each, "") for each in sequences]):
            findings += blocks.find([self._holding(each, self._tell(each)) for each in sequences])
        return findings

    def _holding(self, sequence: Sequence, name: str) -> Holding:
        """Return what a running sequence believes to hold."""
        num_registered = min(sequence.num_registered, len(sequence.block_table))
        content = sequence.chain.blocks(num_registered, sequence.tokens)
        exchanges = self._running.registers(sequence)
        return Holding(name, sequence.block_table, content, sequence.block_uses, exchanges)

    def _tell(self, sequence: Sequence) -> str:
        self._running.table.sync(sequence)
        return sequence.tell()

    def _problems_of_sequences(self, running: list[Sequence]) -> list[str]:
        problems: list[str] = []
        waiting = self._queue.sequences()
        if {*waiting, *running} != set(self._roster.sequences()):
            problems.append("the live sequences are not those that wait or run")
        problems += [f"waits and runs: {each.tell()}" for each in waiting if each.is_running]
        problems += [f"runs unplanned: {each.tell()}" for each in running if not each.is_running]
        if sum(len(each.tokens) for each in waiting) != self._queue.num_tokens:
            problems.append("the waiting queue's token count is wrong")
        problems += self._running.swap.audit([each.host_blocks for each in waiting])
        watched = sum(len(each.stop_token_ids) for each in running)
        if int(self._running.stop_watch.sum()) != watched:
            problems.append("the watch for stop tokens does not fit the running sequences")
        return problems


class CheckTimer:
    """When everything is to be checked again: when the engine has come to rest, and now and then.

    However long a check takes, it takes no more than a thousandth of the time.
    """

    def __init__(self, now: float) -> None:
        self._last = now
        self._least_s = 0.0
        self._is_checked = True

    def is_due(self, now: float, *, is_busy: bool) -> bool:
        """Return whether to check now; called whenever the loop comes round."""
        if is_busy:
            self._is_checked = False
        interval_s = BUSY_INTERVAL_S if is_busy else REST_INTERVAL_S
        return not self._is_checked and now - self._last >= max(interval_s, self._least_s)

    def checked(self, started: float, ended: float) -> None:
        """Note that everything has been checked."""
        self._last = ended
        self._least_s = LEAST_TIMES_APART * (ended - started)
        self._is_checked = True

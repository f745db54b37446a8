"""The ranks' end of the scheduler process: one connection each, one frame for all.

Knows who is there and what they have; what their results mean is the core's business.
"""

import logging
from dataclasses import dataclass
from typing import assert_never

import msgspec
import zmq

from protocol.channels import Dealer
from protocol.columns import unpack_int32
from protocol.connection import Codec, Connection, Outgoing
from protocol.errors import ProcessError, ProtocolError
from protocol.messages import (
    Drain,
    EngineFacts,
    Hello,
    Ping,
    Resend,
    Reset,
    Role,
    StepPlan,
    StepResult,
    WorkerToScheduler,
)
from protocol.recording import Recorder
from protocol.run_dir import RunDir
from scheduler.rank_group import Answered, RankGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    dealer: Dealer
    connection: Connection[WorkerToScheduler]


class Ranks:
    """All ranks of the group: their Hellos, the plans to them, their results."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        names: RunDir,
        num_ranks: int,
        step_timeout_s: float,
        *,
        epoch: int,
        recorder: Recorder | None = None,
    ) -> None:
        codec: Codec[WorkerToScheduler] = Codec(WorkerToScheduler)
        # Every rank gets the same frames: their digests are compared.
        self._outgoing = Outgoing(epoch)
        self._ranks: list[_Rank] = []
        for number in range(num_ranks):
            address = names.rank_address(number)
            dealer = Dealer(context, address, bind=True, recorder=recorder)
            connection = Connection(dealer.send, codec, self._outgoing)
            self._ranks.append(_Rank(number, dealer, connection))
        self._group = RankGroup(num_ranks, step_timeout_s)
        self._facts: dict[int, EngineFacts] = {}
        self._fingerprint: str | None = None
        self._is_greeted = False

    @property
    def dealers(self) -> list[Dealer]:
        """The sockets to wait for."""
        return [rank.dealer for rank in self._ranks]

    def missing(self) -> list[int]:
        """Return the ranks that have not said Hello."""
        return [rank.number for rank in self._ranks if rank.number not in self._facts]

    def facts(self) -> EngineFacts:
        """Return the group's facts, once no rank is missing: rank 0's, with the fewest blocks and
        the slowest moves to the host."""
        every = self._facts.values()
        return msgspec.structs.replace(
            self._facts[0],
            num_blocks=min(facts.num_blocks for facts in every),
            swap_block_s=max(facts.swap_block_s for facts in every),
        )

    def greet(self, hello: Hello) -> None:
        """Answer every rank's Hello: from now on plans may come."""
        self._is_greeted = True
        for rank in self._ranks:
            rank.connection.hello(
                msgspec.structs.replace(hello, fingerprint=self._fingerprint or "")
            )

    def send(self, plan: StepPlan, now: float) -> None:
        """Send a plan to every rank."""
        frame = self._outgoing.frame(plan)
        for rank in self._ranks:
            rank.connection.send_frame(frame)
        prompt_tokens = sum(unpack_int32(plan.chunks)[2::4])  # the counts, see StepPlan
        self._group.sent(plan.step_id, now, prompt_tokens=prompt_tokens)

    def receive(self, now: float) -> list[Answered]:
        """Return rank 0's results of the steps that all ranks have answered by now, in order.

        Raises ProtocolError or ProcessError when a rank breaks a rule, is another than the
        others, or has lost its state.
        """
        answered: list[Answered] = []
        for rank in self._ranks:
            for frame in rank.dealer.drain():
                message = rank.connection.receive(frame)
                match message:
                    case StepResult():
                        answered += self._group.receive(rank.number, message, now)
                    case Hello():
                        self._meet(rank.number, message)
                    case Reset():
                        raise ProcessError(f"Rank {rank.number} has lost track of the scheduler.")
                    case None | Ping() | Drain() | Resend():
                        pass  # the connection has done what there is to do
                    case _:
                        assert_never(message)
        return answered

    def deadline(self) -> float | None:
        """Return when `check` will have something to say, unless results come."""
        return self._group.deadline()

    def check(self, now: float) -> None:
        """Raise ProcessError if a step has been unanswered for too long."""
        self._group.check(now)

    def _meet(self, number: int, hello: Hello) -> None:
        facts = hello.facts
        if hello.role is not Role.WORKER or facts is None or facts.rank != number:
            who = "no rank" if facts is None else f"rank {facts.rank}"
            raise ProtocolError(
                f"A {hello.role.name.lower()} that is {who} connected where rank {number} belongs."
            )
        if number in self._facts and self._is_greeted:
            raise ProcessError(f"Rank {number} has restarted; its slots and blocks are lost.")
        if hello.epoch not in (0, self._outgoing.epoch):
            raise ProtocolError(
                f"Rank {number} is of epoch {hello.epoch}, this scheduler of epoch "
                f"{self._outgoing.epoch}."
            )
        self._check_agreement(number, hello, facts)
        self._facts[number] = facts
        log.info(
            "met rank=%d back_end=%s blocks=%d block_size=%d slots=%d max_model_len=%d",
            *(number, facts.back_end, facts.num_blocks, facts.block_size),
            *(facts.slots, facts.max_model_len),
        )

    def _check_agreement(self, number: int, hello: Hello, facts: EngineFacts) -> None:
        """Raise ProtocolError unless a rank is of the same kind as those met before."""
        if self._fingerprint is None:
            self._fingerprint = hello.fingerprint
        if hello.fingerprint != self._fingerprint:
            raise ProtocolError(
                f"Rank {number} has the fingerprint {hello.fingerprint or 'none'}, those before it "
                f"{self._fingerprint or 'none'}: give all ranks the same model, dtype, --tp and "
                "--max-model-len."
            )
        for other, known in self._facts.items():
            same = msgspec.structs.replace(
                known,
                rank=number,
                num_blocks=facts.num_blocks,
                swap_block_s=facts.swap_block_s,
            )
            if same != facts:
                raise ProtocolError(
                    f"Rank {number} and rank {other} differ in more than their number of blocks: "
                    f"{facts} and {known}."
                )

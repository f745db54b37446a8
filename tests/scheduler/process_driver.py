"""Runs the scheduler's `run` in a thread and plays the launcher, the ranks and the frontends."""

import gc
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgpack
import msgspec
import zmq

from protocol.channels import Dealer
from protocol.columns import unpack_int32, unpack_int64
from protocol.connection import Codec, Connection
from protocol.errors import EngineError, LauncherGoneError
from protocol.lifecycle import Lifeline, ProcessConfig
from protocol.messages import (
    ChildToLauncher,
    EngineFacts,
    Hello,
    Role,
    SchedulerToFrontend,
    SchedulerToWorker,
    StepPlan,
    StepResult,
    TokenDeltas,
)
from protocol.run_dir import RunDir
from scheduler.config import SchedulerConfig
from scheduler.process import run
from tests.scheduler.simulation import SimulatedRank

PATIENCE_S = 10.0


class Peer:
    """One end of a connection to the scheduler."""

    def __init__(self, context: zmq.Context, address: str, union: object) -> None:
        self.dealer = Dealer(context, address, bind=False)
        self.connection = Connection(self.dealer.send, Codec(union))
        self.pending: deque = deque()

    def receive(self, kind):
        """Return the next message of a kind, passing over others."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            while self.pending:
                message = self.pending.popleft()
                if isinstance(message, kind):
                    return message
            assert time.monotonic() < deadline, f"no {kind.__name__} came"
            self.collect()

    def collect(self, timeout_s: float = 0.1) -> None:
        self.dealer.socket.poll(int(timeout_s * 1000))
        for frame in self.dealer.drain():
            message = self.connection.receive(frame)
            if isinstance(message, Hello):
                self.connection.adopt_epoch(message.epoch)
            if message is not None:
                self.pending.append(message)


class FakeRank(Peer):
    """A rank whose arithmetic is a simulated rank's."""

    def __init__(self, context: zmq.Context, names: RunDir, facts: EngineFacts) -> None:
        super().__init__(context, names.rank_address(facts.rank), SchedulerToWorker)
        self.facts = facts
        self.arithmetic = SimulatedRank(facts.num_blocks, facts.block_size)

    def hello(self, **changes) -> None:
        hello = Hello(
            role=Role.WORKER,
            identity=b"rank-%d" % self.facts.rank,
            fingerprint="f" * 64,
            facts=self.facts,
        )
        self.connection.hello(msgspec.structs.replace(hello, **changes))

    def answer(self, digest: int = 0) -> StepPlan:
        """Execute the next plan and answer it."""
        plan = self.receive(StepPlan)
        result: StepResult = self.arithmetic.execute(plan)
        self.connection.send(msgspec.structs.replace(result, digest=digest))
        return plan


class FakeFrontend(Peer):
    """A frontend that keeps what it hears."""

    def __init__(self, context: zmq.Context, names: RunDir) -> None:
        super().__init__(context, names.scheduler_address(), SchedulerToFrontend)

    def hello(self) -> Hello:
        self.connection.hello(Hello(role=Role.FRONTEND, identity=b"frontend"))
        answer: Hello = self.receive(Hello)
        return answer

    def rows(self) -> list[tuple[int, ...]]:
        """Return (request, sample, first_index, count, reason) of the next deltas, and the ids."""
        deltas: TokenDeltas = self.receive(TokenDeltas)
        return list(
            zip(
                unpack_int64(deltas.requests),
                unpack_int32(deltas.samples),
                unpack_int32(deltas.first_index),
                unpack_int32(deltas.counts),
                unpack_int32(deltas.reasons),
                strict=True,
            )
        )

    def output(self, request_id: int, step: Callable[[], object]) -> tuple[list[int], int]:
        """Return tokens and reason of the only live request, calling `step` before each wait."""
        tokens: list[int] = []
        while True:
            step()
            deltas: TokenDeltas = self.receive(TokenDeltas)
            assert unpack_int64(deltas.requests) == [request_id]
            assert unpack_int32(deltas.first_index) == [len(tokens)]
            tokens += unpack_int32(deltas.token_ids)
            (reason,) = unpack_int32(deltas.reasons)
            if reason:
                return tokens, reason


class ProcessDriver:
    """The scheduler's process, in a thread, and everybody around it."""

    def __init__(self, run_dir: Path, **settings) -> None:
        self.names = RunDir(str(run_dir))
        self.context = zmq.Context()
        lifeline, self._launcher = os.pipe()
        self._reports, report = os.pipe()
        self._fds = [lifeline, self._reports, report]
        process = ProcessConfig(run_dir=str(run_dir), lifeline_fd=lifeline, report_fd=report)
        self.config = SchedulerConfig(process=process, **settings)
        self.error: EngineError | None = None
        self._peers: list[Peer] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "ProcessDriver":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        if self._launcher >= 0:
            self.cut_lifeline()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the scheduler does not end"
        for peer in self._peers:
            peer.dealer.close()
        self.context.destroy(linger=0)
        for descriptor in self._fds:
            os.close(descriptor)
        gc.unfreeze()

    def _run(self) -> None:
        try:
            run(self.config, Lifeline(self.config.process))
        except EngineError as error:
            self.error = error

    def cut_lifeline(self) -> None:
        os.close(self._launcher)
        self._launcher = -1

    def ends_with(self, kind: type[EngineError]) -> str:
        """Wait for the end and return its sentence."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the scheduler goes on"
        assert isinstance(self.error, kind), repr(self.error)
        return str(self.error)

    def ends_quietly(self) -> None:
        self.cut_lifeline()
        self.ends_with(LauncherGoneError)

    def reports(self) -> list:
        """Return what has been reported to the launcher so far."""
        os.set_blocking(self._reports, False)
        data, decoder = b"", msgspec.msgpack.Decoder(ChildToLauncher)
        try:
            data = os.read(self._reports, 1 << 16)
        except BlockingIOError:
            return []
        return [decoder.decode(each) for each in _split(data)]

    def rank(self, number: int = 0, *, num_blocks: int = 32, **changes) -> FakeRank:
        facts = EngineFacts(
            rank=number,
            back_end="checksum",
            block_size=4,
            num_blocks=num_blocks,
            slots=4,
            max_model_len=64,
            vocab_size=40,
        )
        rank = FakeRank(self.context, self.names, msgspec.structs.replace(facts, **changes))
        self._peers.append(rank)
        return rank

    def frontend(self) -> FakeFrontend:
        frontend = FakeFrontend(self.context, self.names)
        self._peers.append(frontend)
        return frontend


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something has happened that no message tells."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


def _split(stream: bytes) -> list[bytes]:
    """Cut a msgpack stream into messages."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(stream)
    return [msgpack.packb(each) for each in unpacker]

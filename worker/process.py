"""The worker's main loop: a plan in, a result out.

    scheduler ──Hello, StepPlan──►  this rank  ──Hello, StepResult──►  scheduler

This file knows neither slots nor models; those are the runner's. A plan is launched as soon as it
comes, so that a device has the next step at hand when it ends one, and a result is sent as soon as
there is one. The loop waits in one place, with the launcher's lifeline.
"""

import gc
import logging
import os
from typing import assert_never

import zmq

from protocol.channels import Dealer, Inbox
from protocol.connection import Codec, Connection
from protocol.errors import ProcessError, ProtocolError
from protocol.flags import describe_config
from protocol.lifecycle import HEARTBEAT_INTERVAL_S, Lifeline
from protocol.messages import (
    Drain,
    Hello,
    Ping,
    Resend,
    Reset,
    Role,
    SchedulerToWorker,
    StepPlan,
)
from protocol.recording import recorder
from protocol.run_dir import RunDir
from worker.back_ends import build_runner
from worker.config import WorkerConfig
from worker.fingerprint import fingerprint
from worker.runner import StepRunner
from worker.steps import Steps

log = logging.getLogger(__name__)


def run(config: WorkerConfig, lifeline: Lifeline) -> None:
    """Serve one rank until the launcher ends or something fails."""
    log.info("config %s", describe_config(config))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        _serve(config, lifeline, context)
    finally:
        context.destroy(linger=0)


def _serve(
    config: WorkerConfig, lifeline: Lifeline, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    process = config.process
    dealer = Dealer(
        context,
        RunDir(process.run_dir).rank_address(config.rank),
        bind=False,
        recorder=recorder(process.record, f"worker-{config.rank}"),
    )
    inbox = Inbox(lifeline, dealer)
    runner = build_runner(config)
    steps = Steps(runner, reports=config.rank == 0)
    codec: Codec[SchedulerToWorker] = Codec(SchedulerToWorker)
    connection = Connection(dealer.send, codec)
    hello = _hello(config, runner)
    connection.hello(hello)
    gc.freeze()  # nothing that exists by now becomes garbage
    log.info("waits for the scheduler address=%s", dealer.address)

    while True:
        # The only place where this process waits. While the device computes it looks in turn for
        # plans and for the step's end: nothing tells of both, and a sleep costs more than a step.
        inbox.wait(0 if steps.is_computing else HEARTBEAT_INTERVAL_S)
        frames = dealer.drain()
        for frame in frames:
            message = connection.receive(frame)
            match message:
                case StepPlan():
                    if repeated := steps.launch(message, frame):
                        connection.send(repeated)
                    _report(steps, connection)
                case Hello():
                    _meet_scheduler(message, hello, steps)
                    connection.adopt_epoch(message.epoch or hello.epoch)
                    lifeline.ready()
                case Reset():
                    raise ProcessError("The scheduler has lost track of this rank.")
                case None | Ping() | Drain() | Resend():
                    pass  # the connection has done what there is to do
                case _:
                    assert_never(message)
        _report(steps, connection)
        if not frames and not steps.is_computing and connection.peer is not None:
            # Shows the scheduler a last result that got lost.
            connection.send(Ping())
        lifeline.heartbeat(steps.last_step_id)


def _report(steps: Steps, connection: Connection[SchedulerToWorker]) -> None:
    for result in steps.finished():
        connection.send(result)


def _hello(config: WorkerConfig, runner: StepRunner) -> Hello:
    facts = runner.facts
    return Hello(
        role=Role.WORKER,
        identity=os.urandom(16),
        epoch=config.process.epoch,
        fingerprint=fingerprint(
            config.model,
            arithmetic=f"{config.load_format} {config.device} {config.dtype} {config.quantization} "
            f"{config.kv_cache_dtype} {facts.back_end}",
            tp=config.tp,
            max_model_len=facts.max_model_len,
        ),
        facts=facts,
    )


def _meet_scheduler(theirs: Hello, ours: Hello, steps: Steps) -> None:
    """Check the scheduler's Hello. Raises ProtocolError or ProcessError if the two do not fit."""
    if theirs.role is not Role.SCHEDULER:
        raise ProtocolError(f"A {theirs.role.name.lower()} is where the scheduler should be.")
    if theirs.epoch != ours.epoch and theirs.epoch != 0 and ours.epoch != 0:
        raise ProtocolError(
            f"The scheduler is of epoch {theirs.epoch}, this rank of epoch {ours.epoch}."
        )
    if theirs.fingerprint not in ("", ours.fingerprint):
        raise ProtocolError(
            "The scheduler expects another model, dtype, --tp or --max-model-len than this rank "
            "has; give all ranks the same flags."
        )
    if steps.has_run:
        raise ProcessError("The scheduler has restarted; this rank's slots are of its old life.")
    log.info("serves epoch=%d", theirs.epoch)

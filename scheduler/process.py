"""The scheduler's main loop: sockets and the clock around the core.

    frontends  ──Hello, AddSequence, Abort──►  scheduler  ──Hello, StepPlan──►  ranks
    frontends  ◄─Hello, TokenDeltas, AbortAck─  scheduler  ◄─Hello, StepResult──  ranks
    frontends  ──ResetCache──►  scheduler  ──CacheReset──►  frontends

Everything that is decided is decided in `scheduler.scheduler`. This file knows what has to happen
in which order when a message comes, a step is answered, or time passes.
"""

import gc
import logging
import os
import time
from typing import assert_never

import msgspec
import zmq

from protocol.channels import Inbox, Router
from protocol.errors import ConfigError, RequestError
from protocol.flags import describe_config
from protocol.lifecycle import HEARTBEAT_INTERVAL_S, Lifeline
from protocol.messages import (
    Abort,
    AddSequence,
    CacheReset,
    EngineFacts,
    Hello,
    Ping,
    ResetCache,
    Role,
)
from protocol.recording import recorder
from protocol.run_dir import RunDir
from protocol.running_clock import RunningClock
from protocol.validation import longest_sequence
from scheduler.admission_rate import AdmissionRate
from scheduler.config import SchedulerConfig, token_budget
from scheduler.deltas import refusal
from scheduler.frontends import Event, Frontends, Left
from scheduler.gathering import Gathering
from scheduler.policy import LatencyPolicy, Policy, ThroughputPolicy
from scheduler.ranks import Ranks
from scheduler.scheduler import Scheduler
from scheduler.self_check import CheckTimer
from scheduler.stats import StatsLine

SHORTEST_SEQUENCE = 2

log = logging.getLogger(__name__)


def run(config: SchedulerConfig, lifeline: Lifeline) -> None:
    """Schedule until the launcher ends or something fails."""
    log.info("config %s", describe_config(config))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        _serve(config, lifeline, context)
    finally:
        context.destroy(linger=0)


def _serve(
    config: SchedulerConfig, lifeline: Lifeline, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    names = RunDir(config.process.run_dir)
    taps = recorder(config.process.record, "scheduler")
    # Started by hand it is the scheduler that names the epoch: a later start, a higher number.
    epoch = config.process.epoch or int(time.time())
    hello = Hello(role=Role.SCHEDULER, identity=os.urandom(16), epoch=epoch)
    router = Router(context, names.scheduler_address(), recorder=taps)
    ranks = Ranks(context, names, config.tp, config.step_timeout_s, epoch=epoch, recorder=taps)
    facts = _meet_ranks(ranks, lifeline)
    policy = _policy(config)
    scheduler = _build_scheduler(config, facts, policy)
    gathering = Gathering(budget=policy.budget, patience_s=policy.gather_s)
    frontends = Frontends(router, msgspec.structs.replace(hello, facts=facts))
    ranks.greet(hello)
    inbox = Inbox(lifeline, router, *ranks.dealers)
    stats = StatsLine(time.monotonic())
    rate = AdmissionRate()
    # By this clock a rank is not late because all of us were stopped.
    clock = RunningClock(time.monotonic(), longest_pause_s=4 * HEARTBEAT_INTERVAL_S)
    checks = CheckTimer(time.monotonic())
    gc.freeze()  # nothing that exists by now becomes garbage
    lifeline.ready()
    log.info("serves epoch=%d", epoch)

    while True:
        inbox.wait(_patience(scheduler, ranks, gathering, clock))
        now = time.monotonic()
        running = clock.read(now)
        for source, event in frontends.receive():
            _apply(scheduler, frontends, source, event)
        outputs = scheduler.expire(now)
        for result, seconds in ranks.receive(running):
            outputs += scheduler.commit(result, seconds)
        # Plans before outputs: a rank may be waiting for one.
        while not _gathers(gathering, scheduler, now) and (plan := scheduler.schedule()):
            ranks.send(plan, running)
        for source, deltas in outputs:
            frontends.send(source, deltas)
        if frontends.is_ping_due(now, scheduler.waiting_requests, scheduler.waiting_tokens):
            for source, positions in scheduler.queue_positions():
                frontends.send_positions(source, positions)
            frontends.ping(now, _queue_state(scheduler, config, rate, now))
        ranks.check(running)

        if scheduler.has_stumbled or _check_is_due(checks, scheduler, facts, now):
            _check(scheduler, frontends, checks)
        is_computing = scheduler.num_unanswered > 0
        if line := stats.due(now, scheduler.counters, is_computing=is_computing):
            log.info("stats %s %s", _describe(scheduler, facts), line)
        lifeline.heartbeat(scheduler.last_step_id)


def _meet_ranks(ranks: Ranks, lifeline: Lifeline) -> EngineFacts:
    """Wait for every rank's Hello and return what the group has.

    Frontends that are there already wait in their socket meanwhile.
    """
    inbox = Inbox(lifeline, *ranks.dealers)
    told: list[int] = []
    while missing := ranks.missing():
        if missing != told:
            log.info("waits for ranks=%s", ",".join(map(str, missing)))
            told = missing
        inbox.wait(HEARTBEAT_INTERVAL_S)
        ranks.receive(time.monotonic())
        lifeline.heartbeat()
    return ranks.facts()


def _policy(config: SchedulerConfig) -> Policy:
    budget = token_budget(config.policy, config.max_num_batched_tokens)
    if config.policy == "throughput":
        return ThroughputPolicy(budget)
    target_ms = config.itl_target_ms
    return LatencyPolicy(budget, itl_target_s=None if target_ms is None else target_ms / 1000)


def _build_scheduler(config: SchedulerConfig, facts: EngineFacts, policy: Policy) -> Scheduler:
    if longest_sequence(facts) < SHORTEST_SEQUENCE:
        raise ConfigError(
            f"--num-blocks {facts.num_blocks} of --block-size {facts.block_size} at "
            f"--max-model-len {facts.max_model_len} hold {longest_sequence(facts)} token; a "
            f"sequence has at least {SHORTEST_SEQUENCE}, one of prompt and one of output."
        )
    log.info(
        "group blocks=%d block_size=%d slots=%d max_model_len=%d budget=%d",
        *(facts.num_blocks, facts.block_size, facts.slots, facts.max_model_len, policy.budget),
    )
    return Scheduler(
        facts,
        policy,
        max_in_flight=config.max_in_flight,
        prefix_key=os.urandom(32) if config.prefix_cache else None,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
    )


def _queue_state(
    scheduler: Scheduler, config: SchedulerConfig, rate: AdmissionRate, now: float
) -> Ping:
    rate.observe(
        now,
        admitted_tokens=scheduler.admitted_tokens,
        waiting_tokens=scheduler.waiting_tokens,
    )
    return Ping(
        waiting_requests=scheduler.waiting_requests,
        waiting_tokens=scheduler.waiting_tokens,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        retry_after_s=rate.retry_after_s(scheduler.waiting_tokens),
        cache=scheduler.cache_stats(),
    )


def _gathers(gathering: Gathering, scheduler: Scheduler, now: float) -> bool:
    return gathering.waits(
        now,
        waiting_tokens=scheduler.waiting_tokens,
        has_rows=scheduler.has_rows,
        is_computing=scheduler.num_unanswered > 0,
    )


def _patience(
    scheduler: Scheduler, ranks: Ranks, gathering: Gathering, clock: RunningClock
) -> float:
    """Return how long nothing needs to be done, unless a message comes."""
    now = time.monotonic()
    moments = [
        (scheduler.next_deadline(), now),
        (None if scheduler.num_unanswered else gathering.deadline, now),
        (ranks.deadline(), clock.read(now)),
    ]
    waits = [moment - since for moment, since in moments if moment is not None]
    return min([HEARTBEAT_INTERVAL_S, *waits])


def _apply(scheduler: Scheduler, frontends: Frontends, source: bytes, event: Event) -> None:
    match event:
        case AddSequence():
            try:
                told = scheduler.add(source, event)
            except RequestError as error:
                log.warning(
                    "refused request=%d sample=%d code=%s: %s",
                    *(event.request_id, event.sample, error.code.name, error.message),
                )
                frontends.send(source, refusal(event, error.code))
                return
            for _, deltas in told:
                frontends.send(source, deltas)
        case Abort():
            # What it names may be over or have never come: then the answer says so.
            ack = scheduler.abort(source, event.request_id, event.sample)
            frontends.send(source, ack)
        case ResetCache():
            forgotten = scheduler.reset_prefix_cache()
            log.info("reset the prefix cache frontend=%s blocks=%d", source.hex(), forgotten)
            frontends.send(source, CacheReset(blocks_forgotten=forgotten))
        case Left():
            ended = scheduler.drop_source(source)
            log.info("left frontend=%s because it %s; ended=%d", source.hex(), event.how, ended)
        case _:
            assert_never(event)


def _check_is_due(checks: CheckTimer, scheduler: Scheduler, facts: EngineFacts, now: float) -> bool:
    is_busy = scheduler.num_live > 0
    is_due = checks.is_due(now, is_busy=is_busy)
    return is_due or (not is_busy and scheduler.num_free_blocks != facts.num_blocks)


def _check(scheduler: Scheduler, frontends: Frontends, checks: CheckTimer) -> None:
    """Have everything checked and repaired, and say loudly what was wrong."""
    started = time.monotonic()
    checked = scheduler.check()
    checks.checked(started, time.monotonic())
    for problem in checked.problems:
        log.error("our bug, please report: %s", problem)
    for source, deltas in checked.deltas:
        frontends.send(source, deltas)


def _describe(scheduler: Scheduler, facts: EngineFacts) -> str:
    num_quarantined = scheduler.block_manager.num_quarantined
    quarantined = f" quarantined_blocks={num_quarantined}" if num_quarantined else ""
    return (
        f"running={scheduler.num_running} waiting={scheduler.waiting_requests} "
        f"free_blocks={scheduler.num_free_blocks}/{facts.num_blocks} "
        f"cached_blocks={scheduler.block_manager.num_cached} "
        f"indexed_blocks={scheduler.block_manager.num_indexed}{quarantined}"
    )

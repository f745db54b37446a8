"""The text process: a loop around the desk."""

import dataclasses
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import zmq

from frontend.text.cache import TokenizerCache
from frontend.text.config import TextConfig, tokenizer_caches
from frontend.text.desk import TextDesk
from frontend.text.find import conversion_key, find_text_model
from frontend.text.text_model import TextModel
from protocol.channels import Dealer, Inbox
from protocol.connection import Codec, Connection
from protocol.errors import ModelFileError
from protocol.flags import to_flags
from protocol.lifecycle import Lifeline
from protocol.messages import FrontendToText, Hello, Role, TextJob
from protocol.recording import recorder

IDLE_WAIT_S = 3600.0
MEMORY_FOR_JOBS = 2 << 30
"""Bytes of address space that jobs may take beside what the process has at start."""

log = logging.getLogger(__name__)


def run(config: TextConfig, lifeline: Lifeline) -> None:
    """Do text jobs until the frontend ends."""
    started = time.monotonic()
    model = _text_model(config)
    # Before the template is compiled, which computes its constants.
    _limit_memory()
    desk = _rehearsed_desk(model, config.rehearsal_cpu_s)
    taps = recorder(config.process.record, f"text-{os.getpid()}")
    channel = Dealer(zmq.Context(), config.address, bind=False, recorder=taps)
    inbox = Inbox(lifeline, channel)
    connection: Connection[FrontendToText] = Connection(channel.send, Codec(FrontendToText))
    connection.adopt_epoch(config.process.epoch)
    connection.hello(Hello(role=Role.TEXT, identity=os.urandom(16), epoch=config.process.epoch))
    lifeline.ready()
    log.info("ready seconds=%.2f", time.monotonic() - started)
    while True:
        inbox.wait(IDLE_WAIT_S)
        for frame in channel.drain():
            message = connection.receive(frame)
            if isinstance(message, TextJob):
                connection.send(desk.do(message))


def _text_model(config: TextConfig) -> TextModel:
    """Return the model's text facts; convert its tokenizer first where that was never done."""
    model = Path(config.model)
    caches = tokenizer_caches(config.tokenizer_cache, config.process.run_dir)
    found = find_text_model(model, caches, config.chat_template)
    if found is None:
        if config.converted:
            raise ModelFileError(f"The converted tokenizer of {model} cannot be written or read.")
        _convert(model, caches)
        _start_anew(dataclasses.replace(config, converted=True))
    return found


def _convert(model: Path, caches: list[TokenizerCache]) -> None:
    log.info("converting the tokenizer model=%s", model)
    # Imported here because it takes seconds, and only a first start needs it.
    from frontend.text.build import convert  # noqa: PLC0415

    conversion = convert(model)
    any(cache.store(conversion_key(model), conversion) for cache in caches)


def _start_anew(config: TextConfig) -> NoReturn:
    """Shed the libraries of a conversion, which are large and which jobs do not need."""
    os.execv(  # noqa: S606
        sys.executable, [sys.executable, "-m", "frontend.text", *to_flags(config)]
    )


def _rehearsed_desk(model: TextModel, limit_s: float) -> TextDesk:
    """Return a desk whose template has been compiled and tried.

    A template that loops would do so for ever, perhaps inside one call of a library. So the kernel
    counts, and ends the process with SIGPROF, of which the frontend makes a sentence. Processor
    time, because at start the machine is busy with other things.
    """
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    desk = TextDesk(model)
    desk.rehearse()
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    return desk


def _limit_memory() -> None:
    """Let a job that wants all memory fail instead of the machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_FOR_JOBS
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

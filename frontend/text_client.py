"""Text work for the frontend: jobs go to the text process, each with a deadline.

The process does its jobs one after the other; a few are sent ahead so that it never waits for the
next. A job's time runs from when it is the first in line. One that passes its deadline fails and
the process is killed with it; the others go to the next process. If the process dies by itself, the
first job in line is tried once more and fails if that process dies too.
"""

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq.asyncio

from frontend.text.config import TextConfig
from frontend.text_child import TextChild
from protocol.errors import (
    ErrorCode,
    ModelFileError,
    ProcessError,
    ProtocolError,
    RequestError,
)
from protocol.lifecycle import EXIT_USAGE
from protocol.messages import ChatMessage, Hello, TextDone, TextJob, TextKind, TextOptions
from protocol.recording import Recorder

MAX_SENT = 8
"""Jobs at the process at once."""
MAX_WAITING = 1024
PLAIN_OPTIONS = TextOptions()
MAX_FAILED_STARTS = 3
"""Processes in a row that end before they are ready; the next would too, so the run ends."""
RESTART_PAUSE_S = 0.2
"""After a failed start."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    message: TextJob
    limit_s: float
    done: asyncio.Future[TextDone] = field(default_factory=asyncio.Future)
    deaths: int = 0
    """Processes that died with this job first in line."""


class TextClient:
    """The frontend's side of the text process, through all its incarnations."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        config: TextConfig,
        *,
        tokenize_timeout_s: float,
        render_timeout_s: float,
        recorder: Recorder | None = None,
    ) -> None:
        """`config.address` is where incarnations get their addresses from: a number is appended."""
        self.ready = asyncio.Event()
        """Set once the first process has said Hello: its files are sound."""
        self.restarts = 0
        """Processes that had to be replaced."""
        self._context = context
        self._config = config
        self._tokenize_timeout_s = tokenize_timeout_s
        self._render_timeout_s = render_timeout_s
        self._recorder = recorder
        self._child: TextChild | None = None
        """The process that takes jobs; None while there is none."""
        self._waiting: deque[_Job] = deque()
        self._sent: deque[_Job] = deque()
        self._job_ids = 0
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process that takes jobs."""
        return self._child.pid if self._child else None

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Return the token ids of a text, as an int32 column. Raises RequestError."""
        options = TextOptions(add_special_tokens=add_special_tokens)
        limit_s = self._tokenize_timeout_s
        return (await self._do(TextKind.TOKENIZE, text, options, limit_s=limit_s)).token_ids

    async def render(
        self, messages: Sequence[ChatMessage], options: TextOptions = PLAIN_OPTIONS
    ) -> bytes:
        """Return the token ids of a chat, up to the answer. Raises RequestError."""
        limit_s = self._render_timeout_s
        return (await self._do(TextKind.RENDER, list(messages), options, limit_s=limit_s)).token_ids

    async def run(self) -> None:
        """Keep a text process running; never returns.

        Raises ModelFileError or ProcessError if no process becomes ready.
        """
        failed_starts = 0
        while True:
            child = self._start()
            try:
                was_ready = await self._serve(child)
            finally:
                self._child = None
                self._disarm()
                how = child.close()
            failed_starts = 0 if was_ready else failed_starts + 1
            if failed_starts:
                self._give_up_if_hopeless(child, failed_starts, how)
            self._take_back()
            self.restarts += 1
            log.warning("text process replaced because %s", how)
            if not was_ready:
                await asyncio.sleep(RESTART_PAUSE_S)

    def _give_up_if_hopeless(self, child: TextChild, failed_starts: int, how: str) -> None:
        failure = child.failure
        if failure and failure.exit_code == EXIT_USAGE:
            raise ModelFileError(failure.sentence)
        if child.has_looped:
            raise ModelFileError(
                f"The chat template of {self._config.model} takes more than "
                f"{self._config.rehearsal_cpu_s:g} s for one plain message: it loops, and the "
                "model needs another."
            )
        if failed_starts >= MAX_FAILED_STARTS:
            raise ProcessError(f"No text process becomes ready: {how}")

    def _start(self) -> TextChild:
        # A socket of its own for each, so that nothing of a dead one's can reach the next.
        address = f"{self._config.address}.{self.restarts}"
        config = dataclasses.replace(self._config, address=address)
        return TextChild(self._context, config, self._recorder)

    async def _serve(self, child: TextChild) -> bool:
        """Exchange jobs and answers until the process ends; return whether it became ready."""
        answers = asyncio.create_task(self._receive(child))
        try:
            await asyncio.wait({answers, child.ended}, return_when=asyncio.FIRST_COMPLETED)
            if answers.done():
                answers.result()
        except (ProtocolError, ProcessError) as error:
            log.warning("text process talks nonsense pid=%d: %s", child.pid, error)
        finally:
            answers.cancel()
        return self._child is child

    async def _receive(self, child: TextChild) -> None:
        while True:
            message = await child.receive()
            match message:
                case Hello():
                    self._child = child
                    self.ready.set()
                case TextDone():
                    self._finish(message)
            self._send_waiting()

    async def _do(
        self,
        kind: TextKind,
        payload: str | list[ChatMessage],
        options: TextOptions,
        *,
        limit_s: float,
    ) -> TextDone:
        if len(self._waiting) >= MAX_WAITING:
            raise RequestError(ErrorCode.OVERLOADED, "Too many texts wait to be tokenized.")
        self._job_ids += 1
        message = TextJob(job_id=self._job_ids, kind=kind, payload=payload, options=options)
        job = _Job(message, limit_s)
        self._waiting.append(job)
        self._send_waiting()
        done = await job.done
        if done.error is not None:
            raise RequestError(ErrorCode.TEXT_FAILED, done.error)
        return done

    def _send_waiting(self) -> None:
        if self._child is None:
            return
        while self._waiting and len(self._sent) < MAX_SENT:
            job = self._waiting.popleft()
            if job.done.done():
                continue  # Its client has gone.
            self._sent.append(job)
            try:
                self._child.send(job.message)
            except ProcessError:
                # It has just died, or is stuck and must: either way its jobs are taken back.
                self._child.kill()
                return
            if len(self._sent) == 1:
                self._arm()

    def _finish(self, done: TextDone) -> None:
        if not self._sent or self._sent[0].message.job_id != done.job_id:
            raise ProtocolError(f"The text process answers job {done.job_id} out of turn.")
        job = self._sent.popleft()
        if not job.done.done():
            job.done.set_result(done)
        self._arm()

    def _arm(self) -> None:
        """Let the time of the first job in line run."""
        self._disarm()
        if self._sent:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._sent[0].limit_s, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        job = self._sent.popleft()
        log.warning("text job took too long kind=%s", job.message.kind.name.lower())
        _fail(job, f"took longer than {job.limit_s:g} s")
        if self._child is not None:
            self._child.kill()

    def _take_back(self) -> None:
        """Let the next process do what the dead one was given."""
        if self._sent:
            first = self._sent[0]
            first.deaths += 1
            if first.deaths > 1:
                self._sent.popleft()
                _fail(first, "ended the text process twice")
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()


def _fail(job: _Job, what: str) -> None:
    work = (
        "Rendering the messages" if job.message.kind == TextKind.RENDER else "Tokenizing the text"
    )
    if not job.done.done():
        error = RequestError(ErrorCode.TEXT_FAILED, f"{work} {what}; nothing else was affected.")
        job.done.set_exception(error)

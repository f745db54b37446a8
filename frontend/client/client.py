"""The blocking client."""

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from frontend.client.address import resolve_address
from frontend.client.batch import Batch
from frontend.client.link import Link
from frontend.client.requests import Params, Prompt, Prompts, build_request
from frontend.client.results import Event, Generation
from frontend.client.stream import Stream
from frontend.client.window import FIRST_WINDOW, window_for
from protocol.messages import SamplingParams, StatusReply

CONNECT_TIMEOUT_S = 10.0
GENERATE_TIMEOUT_S = 3600.0
STREAM_TIMEOUT_S = 600.0
REPLY_TIMEOUT_S = 10.0
SILENCE_LIMIT_S = 30.0


class Client:
    """A connection to a running engine. Every wait of it is bounded.

        with Client("/path/of/run-dir") as client:
            for generation in client.generate(["One", "Two"], SamplingParams(max_tokens=20)):
                print(generation.text)

    Calls may be nested (a `status` inside a loop over a `stream`), and each gets its own results. A
    client belongs to one thread at a time: a call while another thread is in one raises
    ClientUseError. Once the engine has gone, each call raises the same EngineGoneError; make a new
    client for a new engine.
    """

    def __init__(
        self,
        address: str | Path,
        *,
        window: int | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        """Connect to an engine's frontend and wait until it answers.

        `address`: `ipc://PATH`, `tcp://127.0.0.1:PORT`, or a run directory, of which one frontend
        is taken. `window`: most sequences at the engine at once, what is beyond waits in the
        client; default twice what the engine runs at once. `silence_limit_s`: an engine that
        answers nothing for so many seconds, while a call waits and asks, counts as gone.

        Raises ConfigError for an address that cannot be one, EngineGoneError if nothing answers
        within connect_timeout_s, ProtocolError if another version does.
        """
        self._link = Link(
            resolve_address(address),
            window=window or FIRST_WINDOW,
            silence_limit_s=silence_limit_s,
        )
        try:
            self._link.greet(connect_timeout_s)
            status = self._link.status(connect_timeout_s)
        except BaseException:
            self._link.close()
            raise
        if window is None:
            with self._link.session() as session:
                session.window = window_for(status)

    @property
    def address(self) -> str:
        """The frontend's address, as the socket takes it."""
        return self._link.address

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        on_result: Callable[[Generation], object] | None = None,
        return_errors: bool = False,
        text_options: Mapping[str, object] | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> list[Generation]:
        """Generate from one prompt or many, and return the results in the order of the prompts.

        A prompt is text, a list of token ids, or a list of chat messages. `params` are for all, or
        one for each. `on_result` is called with each result as it comes, in any order; to store
        results of a long run, or to show progress. A request that the engine has no room for is
        tried again.

        `text_options`: how texts and chats become tokens, by the names of the HTTP API's fields:
        add_special_tokens; tools, documents, chat_template, chat_template_kwargs,
        add_generation_prompt, continue_final_message.

        `priority`: requests of a higher one run first; 32 bits, 0 by default. `deadline_s`: seconds
        from when the engine gets a request until all its samples have ended, above 0 and at most a
        week; None: any. A sample that is not finished then has the finish reason TIMEOUT and what
        it came to. What waits in the client for its turn has not begun to count.

        Raises RequestError for the first prompt that is refused or fails, and aborts the others;
        with `return_errors`, its result carries the error instead and the others go on. Raises
        EngineTimeoutError if no result comes for timeout_s seconds, and EngineGoneError.
        """
        batch = Batch(
            prompts,
            params,
            on_result=on_result,
            return_errors=return_errors,
            text_options=text_options,
            priority=priority,
            deadline_s=deadline_s,
        )
        events: deque[Event] = deque()
        with self._link.reserved():
            try:
                with self._link.session() as session:
                    batch.submit(session, events.append)
                while not batch.is_done:
                    self._link.wait(lambda: bool(events), timeout_s)
                    while events:
                        batch.take(events.popleft())
            finally:
                with self._link.session() as session:
                    batch.abort_rest(session)
        return batch.results()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        text_options: Mapping[str, object] | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        on_position: Callable[[int], object] | None = None,
        timeout_s: float = STREAM_TIMEOUT_S,
    ) -> Stream:
        """Generate from one prompt and return its output as it is made.

        `text_options`, `priority` and `deadline_s` are those of `generate`. `on_position` is
        called, while the stream is waited for, with the request's position in the engine's queue
        whenever it has changed: 1 is the next to be admitted, 0 means that it has been. Requests of
        one client are sent in the order in which they were asked for. Raises RequestError for a
        prompt that no engine could take; all else is raised by the stream.
        """
        request = build_request(
            prompt,
            params,
            stream=True,
            text_options=text_options,
            priority=priority,
            deadline_s=deadline_s,
        )
        return Stream(self._link, prompt, request, on_position=on_position, timeout_s=timeout_s)

    def abort(self, request_id: int | None = None, *, timeout_s: float = REPLY_TIMEOUT_S) -> None:
        """End a stream's request, or all of this client's, and wait until the engine has.

        What was open gets the finish reason ABORT. Nothing happens to what has ended. Raises
        EngineTimeoutError, EngineGoneError.
        """
        with self._link.reserved():
            with self._link.session() as session:
                ids = session.live_request_ids if request_id is None else [request_id]
            self._link.abort(ids, timeout_s)

    def status(self, *, timeout_s: float = REPLY_TIMEOUT_S) -> StatusReply:
        """Ask how the engine is. Raises EngineTimeoutError, EngineGoneError."""
        with self._link.reserved():
            return self._link.status(timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float = REPLY_TIMEOUT_S) -> int:
        """Have the engine forget every cached prefix, all clients', and return how many blocks.

        No sequence that starts later is computed from what was written before. What runs goes on.
        Raises RequestError if the engine is not ready, EngineTimeoutError, EngineGoneError.
        """
        with self._link.reserved():
            return self._link.reset_cache(timeout_s)

    def close(self) -> None:
        """Abort what still runs, waiting a second at most, and close the connection."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

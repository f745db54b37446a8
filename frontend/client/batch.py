"""One call's prompts: their results, however they come, put into the order of the prompts. Pure."""

from collections.abc import Callable, Mapping

from frontend.client.requests import Params, Prompts, build_requests, list_prompts
from frontend.client.results import Delta, Event, Generation, GenerationBuilder, Queued
from frontend.client.session import RequestSink, Session
from protocol.errors import RequestError


class Batch:
    """The requests of one `generate` call, from the prompts to the results."""

    def __init__(
        self,
        prompts: Prompts,
        params: Params,
        *,
        on_result: Callable[[Generation], object] | None,
        return_errors: bool,
        text_options: Mapping[str, object] | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> None:
        """Raises RequestError for prompts or parameters that no engine could take."""
        self._prompts = list_prompts(prompts)
        self._requests = build_requests(
            self._prompts,
            params,
            stream=False,
            text_options=text_options,
            priority=priority,
            deadline_s=deadline_s,
        )
        self._on_result = on_result
        self._return_errors = return_errors
        self._builders: dict[int, GenerationBuilder] = {}
        self._results: dict[int, Generation] = {}

    @property
    def is_done(self) -> bool:
        """Whether every prompt has its result."""
        return len(self._results) == len(self._prompts)

    def submit(self, session: Session, sink: RequestSink) -> None:
        """Give all requests to a session, which sends them as it has room."""
        for index, request in enumerate(self._requests):
            request_id = session.submit(request, sink, may_repeat=True)
            prompt = self._prompts[index]
            self._builders[request_id] = GenerationBuilder(index, prompt, request.params.n)

    def take(self, event: Event) -> None:
        """Take in what came to the sink.

        Raises the error a request ended with, unless it is to be returned. What ends a request
        alone can be returned; what ends the engine cannot.
        """
        if isinstance(event, Queued):
            return
        if isinstance(event, Delta):
            self._builders[event.request_id].add(event)
            return
        builder = self._builders.pop(event.request_id)
        if event.error is not None:
            if not isinstance(event.error, RequestError):
                raise event.error
            if not self._return_errors:
                event.error.add_note(f"That was prompts[{builder.index}].")
                raise event.error
        result = builder.build(event.error)
        self._results[result.index] = result
        if self._on_result is not None:
            self._on_result(result)

    def abort_rest(self, session: Session) -> None:
        """Abort what has no result yet."""
        for request_id in self._builders:
            session.abort(request_id)

    def results(self) -> list[Generation]:
        """Return all results in the order of the prompts."""
        return [self._results[index] for index in range(len(self._prompts))]

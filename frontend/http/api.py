"""The routes."""

import importlib.metadata
import logging
import re
import time

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from frontend.engine_client import EngineClient
from frontend.generation import DeadlineError, GenerationRequest, deadline_after
from frontend.http.answers import EventStream, answer_whole
from frontend.http.body import Fields, read_fields
from frontend.http.choices import start_choices
from frontend.http.dialects import ChatDialect, CompletionDialect, Dialect, params_reply
from frontend.http.edge import Edge, error_response
from frontend.http.errors import HttpError, ending_to_http, invalid, to_http
from frontend.http.keys import ApiKeys
from frontend.http.openapi import document
from frontend.http.replies import (
    DetokenizeReply,
    Health,
    ModelCard,
    ModelList,
    PrefixCache,
    ResetPrefixCacheReply,
    SamplingDefaultsReply,
    TokenizeReply,
    TokenizerInfo,
    Version,
)
from frontend.http.sampling import (
    cache_domain,
    chat_messages,
    chat_options,
    chat_params,
    completion_params,
    completion_prompts,
    refuse_unsupported,
)
from frontend.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
    known_fields,
)
from frontend.text.text_model import TextModel
from frontend.vocabulary import Vocabulary
from protocol.columns import unpack_int32
from protocol.errors import ErrorCode, RequestError
from protocol.messages import PROTOCOL_VERSION, CacheStats, EngineFacts, FinishReason, TextOptions
from protocol.validation import validate_prompt

DEFAULT_COMPLETION_TOKENS = 16
"""What /v1/completions generates where max_tokens is absent, as OpenAI does."""
MIN_BODY_LIMIT = 1 << 20
BODY_BYTES_PER_TOKEN = 32
"""Eight times the usual four, so that text of JSON escapes fits."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

log = logging.getLogger(__name__)


class Api:
    """What each route does."""

    def __init__(self, engine: EngineClient, model: str) -> None:
        """`model`: the name it is served by."""
        self._engine = engine
        self._model = model
        self._created = int(time.time())
        self._version = _version()

    def routes(self) -> list[Route]:
        """Return the table of routes."""
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
        ]

    async def chat_completions(self, request: Request) -> ASGIApp:
        """Answer a chat."""
        self._require_ready()
        fields = await self._read(request)
        body = fields.as_type(ChatRequest)
        self._check(fields, body)
        params = chat_params(body)
        generation = GenerationRequest(
            prompt=chat_messages(body.messages),
            params=params,
            text_options=chat_options(body),
            cache_domain=cache_domain(request.scope["cache_domain"], body.cache_salt),
            priority=body.priority,
            deadline=deadline_after(time.monotonic(), body.deadline_s),
        )
        dialect = ChatDialect(
            self._model,
            self._vocabulary(),
            params.logprobs,
            num_prompt_top=body.prompt_logprobs,
            names_ids=body.return_tokens_as_token_ids,
            show_token_ids=body.return_token_ids,
        )
        return await self._answer(request, body, fields, [generation], dialect)

    async def completions(self, request: Request) -> ASGIApp:
        """Continue prompts."""
        self._require_ready()
        fields = await self._read(request)
        body = fields.as_type(CompletionRequest)
        self._check(fields, body)
        params = completion_params(body)
        prompts = completion_prompts(body.prompt, body.n)
        domain = cache_domain(request.scope["cache_domain"], body.cache_salt)
        deadline = deadline_after(time.monotonic(), body.deadline_s)
        generations = [
            GenerationRequest(
                prompt=prompt,
                params=params,
                text_options=TextOptions(add_special_tokens=body.add_special_tokens),
                default_max_tokens=DEFAULT_COMPLETION_TOKENS,
                cache_domain=domain,
                priority=body.priority,
                deadline=deadline,
            )
            for prompt in prompts
        ]
        echoes = [self._echo(prompt) if body.echo else "" for prompt in prompts]
        dialect = CompletionDialect(
            self._model,
            self._vocabulary(),
            params.logprobs,
            [echo for echo in echoes for _ in range(body.n)],
            num_prompt_top=body.prompt_logprobs,
            names_ids=body.return_tokens_as_token_ids,
            echoes_logprobs=body.echo,
            show_token_ids=body.return_token_ids,
        )
        return await self._answer(request, body, fields, generations, dialect)

    async def models(self, request: Request) -> Response:  # noqa: ARG002
        """List the one model."""
        return _json(ModelList(data=[self._card()]))

    async def model(self, request: Request) -> Response:
        """Describe the model by its name."""
        self._require_model(request.path_params["model"])
        return _json(self._card())

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """Say whether requests are served; 503 if not."""
        engine = self._engine
        reason = engine.why_not_ready()
        is_progressing = engine.is_progressing()
        facts = Health(
            alive=True,
            ready=reason is None,
            progressing=is_progressing,
            reason=reason or (None if is_progressing else "The scheduler does not answer."),
            live_requests=engine.num_live_requests,
            waiting_requests=engine.waiting_requests,
            unacknowledged_aborts=engine.num_unacknowledged_aborts,
            prefix_cache=_prefix_cache(engine.cache),
        )
        return _json(facts, status=200 if facts.ready and is_progressing else 503)

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        """Say what serves here."""
        return _json(Version(version=self._version, protocol_version=PROTOCOL_VERSION))

    async def openapi(self, request: Request) -> Response:  # noqa: ARG002
        """Return the OpenAPI document."""
        content = msgspec.json.encode(document(self._version))
        return Response(content, media_type="application/json")

    async def tokenize(self, request: Request) -> Response:
        """Return a text's token ids."""
        facts = self._require_ready()
        body = (await self._read(request)).as_type(TokenizeRequest)
        ids = await self._engine.tokenize(body.prompt, add_special_tokens=body.add_special_tokens)
        return _json(TokenizeReply(tokens=ids, count=len(ids), max_model_len=facts.max_model_len))

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        facts = self._require_ready()
        body = (await self._read(request)).as_type(DetokenizeRequest)
        if not all(0 <= token_id < facts.vocab_size for token_id in body.tokens):
            raise invalid("tokens", f"holds an id beyond 0 to {facts.vocab_size - 1}")
        return _json(
            DetokenizeReply(prompt=self._engine.decode(body.tokens, skip_special_tokens=False))
        )

    async def reset_prefix_cache(self, request: Request) -> Response:  # noqa: ARG002
        """Forget every cached prefix, of all keys."""
        return _json(ResetPrefixCacheReply(blocks_forgotten=await self._engine.reset_cache()))

    async def tokenizer_info(self, request: Request) -> Response:  # noqa: ARG002
        """Return the special tokens and the chat template."""
        self._require_ready()
        model = self._engine.text_model or TextModel()
        special = model.special_tokens
        return _json(
            TokenizerInfo(
                eos_token=special.get("eos_token"),
                bos_token=special.get("bos_token"),
                pad_token=special.get("pad_token"),
                chat_template=model.chat_template,
                chat_templates=sorted(model.chat_templates),
            )
        )

    # --------------------------------------------------------------------------

    async def _answer(
        self,
        request: Request,
        body: SamplingFields,
        fields: Fields,
        generations: list[GenerationRequest],
        dialect: Dialect,
    ) -> ASGIApp:
        choices = await start_choices(self._engine, generations)
        if body.return_sampling_params:
            dialect.sampling_params = params_reply(choices.params)
        headers = _report_ignored(fields.unknown(known_fields(type(body))))
        if body.stream:
            return EventStream(choices, dialect, body.stream_options, headers)
        return await answer_whole(request.receive, choices, dialect, headers)

    async def _read(self, request: Request) -> Fields:
        facts = self._engine.facts
        max_tokens = facts.max_model_len if facts else 0
        return await read_fields(
            request, max_bytes=max(MIN_BODY_LIMIT, BODY_BYTES_PER_TOKEN * max_tokens)
        )

    def _check(self, fields: Fields, body: SamplingFields) -> None:
        if body.model is not None:
            self._require_model(body.model)
        refuse_unsupported(fields.values, type(body))

    def _require_model(self, name: str) -> None:
        if name != self._model:
            raise RequestError(
                ErrorCode.MODEL_NOT_FOUND,
                f"There is no model {name[:64]!r} here; this server serves {self._model!r}.",
                param="model",
            )

    def _require_ready(self) -> EngineFacts:
        reason, facts = self._engine.why_not_ready(), self._engine.facts
        if reason is not None or facts is None:
            raise RequestError(ErrorCode.NOT_READY, reason or "The engine is starting.")
        return facts

    def _vocabulary(self) -> Vocabulary:
        vocabulary = self._engine.vocabulary
        if vocabulary is None:
            raise RequestError(ErrorCode.NOT_READY, "The tokenizer is not loaded yet.")
        return vocabulary

    def _echo(self, prompt: str | bytes) -> str:
        if isinstance(prompt, str):
            return prompt
        # Checked before it is spelled: what ids spell is kept, and there are no others than these.
        if self._engine.facts is not None:
            validate_prompt(prompt, self._engine.facts)
        return self._engine.decode(unpack_int32(prompt), skip_special_tokens=True)

    def _card(self) -> ModelCard:
        facts = self._engine.facts
        return ModelCard(
            id=self._model,
            created=self._created,
            owned_by="tokenwire",
            max_model_len=facts.max_model_len if facts else None,
            sampling_defaults=SamplingDefaultsReply(
                **msgspec.structs.asdict(self._engine.defaults)
            ),
        )


def build_app(engine: EngineClient, model: str, keys: ApiKeys | None) -> ASGIApp:
    """Return the HTTP surface as an ASGI application. `keys` None: anybody may ask."""
    app = Starlette(
        routes=Api(engine, model).routes(),
        exception_handlers={
            HttpError: _on_http_error,
            RequestError: _on_request_error,
            DeadlineError: _on_deadline,
            HTTPException: _on_routing_error,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False
    return Edge(app, keys)


async def _on_http_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    if not isinstance(error, HttpError):
        raise error
    return error_response(error)


async def _on_request_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    if not isinstance(error, RequestError):
        raise error
    log.warning("refused code=%s: %s", error.code.name, error.message)
    return error_response(to_http(error))


async def _on_deadline(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return error_response(ending_to_http(FinishReason.TIMEOUT))


async def _on_routing_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 405:
        what = f"{request.method[:16]} is not what this path answers"
    else:
        what = f"There is nothing at {request.url.path[:64]!r}"
    return error_response(
        HttpError(error.status_code, f"{what}; see /openapi.json.", headers=error.headers)
    )


async def _on_bug(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return error_response(
        HttpError(500, "An internal error ended the request.", type="server_error")
    )


def _json(reply: msgspec.Struct, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(reply), status_code=status, media_type="application/json")


def _prefix_cache(stats: CacheStats | None) -> PrefixCache | None:
    if stats is None:
        return None
    return PrefixCache(hit_rate=stats.hit_rate, **msgspec.structs.asdict(stats))


def _report_ignored(names: list[str]) -> dict[str, str]:
    """Return the header that names fields without effect; odd names are only counted."""
    if not names:
        return {}
    plain = [name for name in names if _PLAIN_NAME.fullmatch(name)][:32]
    odd = len(names) - len(plain)
    return {"x-ignored-fields": ", ".join([*plain, *([f"and {odd} more"] if odd else [])])}


def _version() -> str:
    try:
        return importlib.metadata.version("tokenwire")
    except importlib.metadata.PackageNotFoundError:
        return "source"

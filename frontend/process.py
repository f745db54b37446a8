"""The frontend's main loop: sockets and HTTP around the engine client.

    HTTP clients    ──►  http server      ─┐
                                           ├─►  engine client  ──►  scheduler link  ──►  scheduler
    ZeroMQ clients  ──►  client endpoint  ─┘          └──►  text client  ──►  text process

One event loop runs it all. Each part is one coroutine that ends only by failing, but for the HTTP
server, whose end after draining is the frontend's.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path

import zmq.asyncio

from frontend.client_address import client_address
from frontend.client_endpoint import ClientEndpoint
from frontend.config import FrontendConfig
from frontend.engine_client import EngineClient
from frontend.http.api import build_app
from frontend.http.keys import read_keys
from frontend.http.listener import listener_url, open_listener
from frontend.http.server import HttpServer, allow_many_connections
from frontend.scheduler_link import SchedulerLink
from frontend.seeds import SeedSource
from frontend.text.config import TextConfig, tokenizer_caches
from frontend.text.find import find_text_model
from frontend.text.generation_config import GenerationConfig
from frontend.text.text_model import TextModel
from frontend.text_client import TextClient
from frontend.vocabulary import Vocabulary, WordlessVocabulary, load_vocabulary
from protocol.channels import AsyncRouter
from protocol.errors import ConfigError, LauncherGoneError, ModelFileError
from protocol.flags import describe_config
from protocol.lifecycle import HEARTBEAT_INTERVAL_S, Lifeline
from protocol.messages import SamplingDefaults
from protocol.recording import Recorder, recorder
from protocol.run_dir import RunDir

FLUSH_S = 0.4
"""After draining, how long the last bytes may take to get out."""

log = logging.getLogger(__name__)


def run(config: FrontendConfig, lifeline: Lifeline) -> None:
    """Serve clients until the launcher ends, a drain is over, or something fails."""
    log.info("config %s", describe_config(config))
    max_connections = allow_many_connections()
    asyncio.run(_serve(config, lifeline, max_connections))


async def _serve(config: FrontendConfig, lifeline: Lifeline, max_connections: int) -> None:
    names = RunDir(config.process.run_dir)
    taps = recorder(config.process.record, f"frontend-{config.index}")
    keys = read_keys(Path(config.api_key_file)) if config.api_key_file else None
    listener = open_listener(
        config.host,
        config.port,
        is_guarded=keys is not None or config.allow_unauthenticated,
        inherited_fd=config.http_fd,
    )
    log.info("listens http=%s", listener_url(listener))
    clients = client_address(config.listen, names.clients_address(config.index), config.index)
    epoch = config.process.epoch
    with _zmq_context() as context:
        text = _text_client(config, context, names, taps)
        link = SchedulerLink(context, names.scheduler_address(), epoch=epoch, recorder=taps)
        engine = EngineClient(
            link.send,
            text,
            SeedSource(config.seed, config.index),
            max_live_sequences=config.max_live_sequences,
        )
        router = _client_router(config, context, clients, taps)
        endpoint = ClientEndpoint(router, engine, config.served_model_name, epoch=epoch)
        app = build_app(engine, config.served_model_name, keys)
        server = HttpServer(app, listener, max_connections=max_connections)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, _stop_soon, engine, config.drain_timeout_s)
        try:
            await _first_to_end(
                ends=[server.run(), _drain(engine, server)],
                others=[
                    link.run(engine),
                    text.run(),
                    endpoint.run(),
                    endpoint.watch(),
                    _become_ready(config, engine, text, lifeline, router.address),
                    _beat(engine, link, lifeline),
                    _watch(engine, lifeline),
                ],
            )
        finally:
            endpoint.close()
            link.close()


def _client_router(
    config: FrontendConfig, context: zmq.asyncio.Context, address: str, taps: Recorder | None
) -> AsyncRouter:
    try:
        return AsyncRouter(context, address, recorder=taps)
    except ConfigError as error:
        if not config.listen:
            raise
        raise ConfigError(f"{str(error).rstrip('.')}: give --listen another port.") from error


def _text_client(
    config: FrontendConfig, context: zmq.asyncio.Context, names: RunDir, taps: Recorder | None
) -> TextClient:
    return TextClient(
        context,
        TextConfig(
            process=config.process,
            address=names.text_address(config.index),
            model=config.model,
            chat_template=config.chat_template,
            tokenizer_cache=config.tokenizer_cache,
        ),
        tokenize_timeout_s=config.tokenize_timeout_s,
        render_timeout_s=config.render_timeout_s,
        recorder=taps,
    )


Part = Coroutine[object, object, None]


async def _first_to_end(ends: list[Part], others: list[Part]) -> None:
    """Run all parts until one of `ends` is over; the failure of any part is ours."""
    last = {asyncio.create_task(part) for part in ends}
    running = last | {asyncio.create_task(part) for part in others}
    try:
        while last <= running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _become_ready(
    config: FrontendConfig,
    engine: EngineClient,
    text: TextClient,
    lifeline: Lifeline,
    clients: str,
) -> None:
    """Report ready once the scheduler and the text process have said Hello."""
    await text.ready.wait()
    model, vocabulary = _load_text(config)
    engine.learn_text(model, vocabulary, _sampling_defaults(config, model))
    log.info("tokenizer loaded")
    while engine.facts is None:
        engine.news.clear()
        await engine.news.wait()
    if vocabulary.num_text_ids > engine.facts.vocab_size:
        # An added token beyond the model's ids is left to the requests that have it: some models
        # are published with one that they never use.
        raise ModelFileError(
            f"The tokenizer of {config.model} has token ids up to {vocabulary.num_text_ids - 1}, "
            f"and the model's are 0 to {engine.facts.vocab_size - 1}: they do not belong together."
        )
    lifeline.ready(clients)
    log.info("serves clients=%s", clients)


def _sampling_defaults(config: FrontendConfig, model: TextModel) -> SamplingDefaults:
    """Return what counts for requests that leave it open, and log it."""
    generation = GenerationConfig() if config.ignore_generation_config else model.generation
    defaults = generation.defaults
    log.info(
        "sampling defaults temperature=%g top_k=%d top_p=%g min_p=%g repetition_penalty=%g "
        "max_tokens=%s from_model=%s",
        *(defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p),
        *(defaults.repetition_penalty, defaults.max_tokens or "room"),
        ",".join(generation.given) or "none",
    )
    if generation.not_honoured and config.index == 0:  # one warning for all frontends
        log.warning(
            "generation_config.json asks for what this engine does not do: %s",
            ", ".join(generation.not_honoured),
        )
    return defaults


def _load_text(config: FrontendConfig) -> tuple[TextModel, Vocabulary]:
    """Return what the text process has found or converted, and what its token ids spell."""
    caches = tokenizer_caches(config.tokenizer_cache, config.process.run_dir)
    model = find_text_model(Path(config.model), caches, config.chat_template)
    if model is None:
        raise ModelFileError(f"The converted tokenizer of {config.model} has gone; start again.")
    if model.tokenizer_file is None:
        return model, WordlessVocabulary()
    return model, load_vocabulary(Path(model.tokenizer_file))


async def _beat(engine: EngineClient, link: SchedulerLink, lifeline: Lifeline) -> None:
    """Report that this loop comes round, and let the scheduler notice a lost last message."""
    while True:
        lifeline.heartbeat()
        if engine.num_live_requests:
            link.ping()
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)


async def _watch(engine: EngineClient, lifeline: Lifeline) -> None:
    """When the lifeline is cut, tell what is open why, then raise LauncherGoneError."""
    descriptor = lifeline.fileno()
    if descriptor is None:
        return
    readable = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, readable.set)
    while True:
        await readable.wait()
        if lifeline.is_cut():
            engine.start_draining(time.monotonic())
            await asyncio.sleep(FLUSH_S)
            raise LauncherGoneError("The launcher has ended.")
        readable.clear()


def _stop_soon(engine: EngineClient, drain_timeout_s: float) -> None:
    """Take nothing new; a second signal leaves what is open no more time."""
    is_second = engine.drain_deadline is not None
    engine.start_draining(time.monotonic() + (0.0 if is_second else drain_timeout_s))


async def _drain(engine: EngineClient, server: HttpServer) -> None:
    """Once nothing new is taken, let what is open finish in time, tell the rest, and end."""
    while engine.drain_deadline is None:
        engine.news.clear()
        await engine.news.wait()
    while engine.num_live_requests and (left := engine.drain_deadline - time.monotonic()) > 0:
        engine.news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await engine.news.wait()
    engine.end_all()
    server.stop()
    await asyncio.sleep(FLUSH_S)
    log.info("drained")


@contextlib.contextmanager
def _zmq_context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)

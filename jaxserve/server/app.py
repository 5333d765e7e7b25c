"""Assembles the application and runs it: layers, routes, signals.

Layers from the socket inwards: GuardedProtocol (bytes) > Guard (headers, slow readers, request id)
> CORS > Auth (keys) > the routes. Each answers in OpenAI's error shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.metadata
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from jaxserve.config import ServerConfig
from jaxserve.obs.metrics import Metrics
from jaxserve.obs.tracing import Tracing
from jaxserve.server import (
    anthropic,
    chat,
    completions,
    embeddings,
    errors,
    openapi,
    pages,
    profiling,
    responses,
    status,
    tokens,
)
from jaxserve.server.auth import Auth, KeyRing
from jaxserve.server.limits import KEEP_ALIVE_S, MAX_HEADER_BYTES, Guard, GuardedProtocol
from jaxserve.server.report import report_forever
from jaxserve.server.service import Service

logger = logging.getLogger("jaxserve.server")

FAMILIES = (completions, chat, responses, anthropic, embeddings, tokens, status, pages, openapi)
FLUSH_S = 5.0  # after the engine has drained, how long answers may take to leave


def create_app(
    engine,
    config: ServerConfig,
    metrics: Metrics | None = None,
    tracing: Tracing | None = None,
    keys: KeyRing | None = None,
):
    """The ASGI application over `engine` (an AsyncEngine, or what keeps its contract).

    metrics, tracing: observers the engine was started with; by default new metrics, without step
    times, and no spans. keys: those accepted; by default those in the settings' file.
    """
    config.validate()
    keys = KeyRing.load(config.api_keys_file) if keys is None else keys
    metrics = metrics or Metrics(engine.stats, engine.model_name)
    service = Service(engine, config, metrics, tracing)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        reporting = asyncio.ensure_future(report_forever(engine))
        yield
        reporting.cancel()

    app = FastAPI(
        title="jaxserve",
        version=importlib.metadata.version("jaxserve"),
        lifespan=lifespan,
        openapi_url=None,  # ours also describes bodies; the pages over it load from elsewhere
        redirect_slashes=False,  # redirects would quote the client's Host header
    )
    app.state.service = service
    families = FAMILIES if config.profile_dir is None else (*FAMILIES, profiling)
    for family in families:
        app.include_router(family.router)
    for kind in errors.HANDLED:
        app.add_exception_handler(kind, errors.handle)
    return _layered(app, config, metrics, keys)


def _layered(app: FastAPI, config: ServerConfig, metrics: Metrics, keys: KeyRing) -> FastAPI:
    app.add_middleware(Auth, keys=keys)
    origins = [origin.strip() for origin in config.allowed_origins.split(",") if origin.strip()]
    app.add_middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )  # fmt: skip
    app.add_middleware(
        Guard, client_timeout_s=config.client_timeout_s, count_response=metrics.count_response
    )
    return app


def serve(
    engine,
    config: ServerConfig,
    listener: socket.socket,
    *,
    keys: KeyRing | None = None,
    metrics: Metrics | None = None,
    tracing: Tracing | None = None,
    on_listening: Callable[[str], None] = lambda url: None,
) -> None:
    """Serves until SIGINT or SIGTERM, then drains; a second signal aborts what still runs.

    listener: made by `bind`. on_listening(url) is called once it accepts connections. Raises
    OSError when another process has come to listen on the port since.
    """
    app = create_app(engine, config, metrics, tracing, keys)
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    server = DrainingServer(app, engine, config, lambda: on_listening(url))
    try:
        with _telling(config.host, config.port):
            listener.listen()  # the event loop does it again, and uvloop is silent when it fails
        server.run(sockets=[listener])
    finally:
        listener.close()
        app.state.service.pool.shutdown(wait=False, cancel_futures=True)
        if tracing is not None:
            tracing.close()


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, which nobody can connect to until it is served; port 0 takes a
    free one. Raises OSError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.set_inheritable(False)
    try:
        with _telling(host, port):
            listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _telling(host: str, port: int) -> Iterator[None]:
    """Tells where it was that one cannot listen, and what to do."""
    try:
        yield
    except OSError as error:
        of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = "try --port=0" if of_port else "give --host an address of this machine"
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; {remedy}") from error


class DrainingServer(uvicorn.Server):
    """uvicorn that keeps listening while the engine drains, so that probes and refusals work."""

    def __init__(self, app, engine, config: ServerConfig, on_listening: Callable[[], None]):
        protocol = type(
            "Protocol", (GuardedProtocol,), {"client_timeout_s": config.client_timeout_s}
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=FLUSH_S,
            )
        )
        self._engine = engine
        self._drain_timeout_s = config.drain_timeout_s
        self._on_listening = on_listening
        self._signals = 0
        self._stages: list[asyncio.Task] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._on_listening()

    def handle_exit(self, sig: int, frame) -> None:
        """First signal: drain, then exit. Second: abort what still runs, then exit. Third: exit."""
        self._signals += 1
        if self._loop is None or self._signals > 2:
            self.should_exit = self.force_exit = True
        elif self._signals == 2:
            self._loop.call_soon_threadsafe(self._begin, self._abort)
        else:
            name, limit = signal.Signals(sig).name, self._drain_timeout_s
            logger.warning("%s: draining for up to %g s; again to abort", name, limit)
            self._loop.call_soon_threadsafe(self._begin, self._drain)

    def _begin(self, stage: Callable) -> None:
        self._stages.append(asyncio.ensure_future(stage()))  # a bare task could be collected

    async def _drain(self) -> None:
        if await asyncio.to_thread(self._engine.drain, self._drain_timeout_s):
            self.should_exit = True
        elif not self.should_exit:
            logger.warning("still running after %g s: aborting the rest", self._drain_timeout_s)
            await self._abort()

    async def _abort(self) -> None:
        """Ends the engine: open requests fail, and their clients are told so before the exit."""
        await asyncio.to_thread(self._engine.shutdown)
        self.should_exit = True

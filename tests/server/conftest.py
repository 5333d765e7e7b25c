"""Clients of the application: httpx straight into ASGI, or real sockets and uvicorn in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading

import httpx
import pytest

from jaxserve.config import ServerConfig

sys.path.insert(0, __file__.rsplit("/", 1)[0])

from fake_engine import FakeEngine

from jaxserve.server import app as server_app

http = httpx.Client(timeout=60)  # patient: test machines are busy


@contextlib.contextmanager
def serving(engine, tracing=None, **settings):
    """Base URL of a real server on a free port; stopped without draining at the end, and what still
    runs then is cancelled."""
    config = ServerConfig(port=0, **settings)
    application = server_app.create_app(engine, config, tracing=tracing)
    listener = server_app.bind(config.host, 0)
    listening = threading.Event()
    server = server_app.DrainingServer(application, engine, config, listening.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert listening.wait(60)
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield type(
            "Running", (), {"url": url, "server": server, "engine": engine, "thread": thread}
        )
    finally:
        server.config.timeout_graceful_shutdown = 0.2
        server.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture
def engine():
    return FakeEngine()


class Client:
    """Synchronous calls into an ASGI application, each in an event loop of its own."""

    def __init__(self, engine, **settings):
        self.engine = engine
        self.app = server_app.create_app(engine, ServerConfig(**settings))

    def request(self, method, path, **arguments) -> httpx.Response:
        async def call():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **arguments)

        return asyncio.run(call())

    def get(self, path, **arguments):
        return self.request("GET", path, **arguments)

    def post(self, path, json=None, **arguments):
        return self.request("POST", path, json=json, **arguments)

    def complete(self, **body):
        return self.post("/v1/completions", {"model": self.engine.model_name, **body})

    def chat(self, content="hi", **body):
        body.setdefault("messages", [{"role": "user", "content": content}])
        return self.post("/v1/chat/completions", {"model": self.engine.model_name, **body})


@pytest.fixture
def client(engine):
    return Client(engine)

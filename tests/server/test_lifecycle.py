"""Clients that leave, engines that fail, probes, signals."""

import asyncio
import signal
import socket
import threading

import httpx
import orjson
import pytest
from fake_engine import MODEL, FakeEngine
from test_completions import error_of

from jaxserve.config import ServerConfig
from jaxserve.server import app as server_app
from tests.server.conftest import Client, http, serving


def talk(engine, scenario, **settings):
    """Runs `await scenario(client)` with a client inside a started application's event loop."""

    async def run():
        application = server_app.create_app(engine, ServerConfig(**settings))
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await asyncio.wait_for(scenario(client), 60)

    asyncio.run(run())


async def asgi_post(engine, path, body, *, leave: asyncio.Event):
    """A request straight into ASGI whose client disconnects when `leave` is set. Sent messages."""
    application = server_app.create_app(engine, ServerConfig())
    incoming = [{"type": "http.request", "body": orjson.dumps(body), "more_body": False}]
    sent = []

    async def receive():
        if incoming:
            return incoming.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": [],
        "query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http",
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    await asyncio.wait_for(application(scope, receive, send), 60)
    return sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_client_that_leaves_ends_its_requests(engine, stream, several):
    async def scenario():
        engine.hold()  # queued or mid-step, no news comes
        leave = asyncio.Event()
        prompts = ["a", "b", "c"] if several else "a"
        body = {"prompt": prompts, "stream": stream}
        asking = asyncio.ensure_future(asgi_post(engine, "/v1/completions", body, leave=leave))
        await engine.until(lambda: len(engine.open) == (3 if several else 1))
        leave.set()
        sent = await asking
        assert engine.open == {} and len(engine.aborted) == (3 if several else 1)
        assert sent == [], "nobody is there to be answered"

    asyncio.run(scenario())


def test_a_client_that_leaves_mid_stream(engine):
    async def scenario():
        leave = asyncio.Event()
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        original = engine._produce

        async def three_then_hold(call):
            count = 0
            async for deltas in original(call):
                yield deltas
                count += 1
                if count == 3:
                    engine.hold()
                    leave.set()

        engine._produce = three_then_hold
        sent = await asgi_post(engine, "/v1/chat/completions", body, leave=leave)
        assert engine.open == {} and len(engine.aborted) == 1
        text = b"".join(message.get("body", b"") for message in sent)
        assert text.count(b"data: ") >= 3 and b"[DONE]" not in text

    asyncio.run(scenario())


def test_leaving_over_a_real_socket(engine):
    engine.hold()
    with serving(engine) as running:
        port = int(running.url.rsplit(":", 1)[1])
        for stream in (b"false", b"true"):
            body = b'{"prompt": "a", "stream": ' + stream + b"}"
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
                    + str(len(body)).encode() + b"\r\n\r\n" + body
                )  # fmt: skip
                wait_for(lambda: len(engine.open) == 1)
            wait_for(lambda: len(engine.open) == 0)
        assert len(engine.aborted) == 2
        assert http.get(running.url + "/health").status_code == 200


def wait_for(condition, seconds=60):
    """Polls what another thread changes."""
    done = threading.Event()
    for _ in range(seconds * 100):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("the condition never held")


@pytest.mark.parametrize(
    "state, live, ready, health",
    [
        ("ready", 200, 200, 200),
        ("starting", 200, 503, 503),
        ("draining", 200, 503, 200),
        ("stuck", 503, 503, 503),
        ("dead", 503, 503, 503),
    ],
)
def test_probes(client, engine, state, live, ready, health):
    engine.state = state
    answers = [client.get(path) for path in ("/live", "/ready", "/health")]
    assert [answer.status_code for answer in answers] == [live, ready, health]
    assert {answer.json()["status"] for answer in answers} == {state}


@pytest.mark.parametrize(
    "state, code",
    [("starting", "engine_starting"), ("draining", "shutting_down"), ("dead", "engine_dead")],
)
def test_requests_to_an_engine_that_cannot_serve(client, engine, state, code):
    engine.state = state
    for response in (client.complete(prompt="a"), client.chat(stream=True)):
        assert error_of(response, 503)["code"] == code
        assert int(response.headers["retry-after"]) >= 1
    assert (response.headers.get("connection") == "close") == (state == "draining")


def test_a_full_queue_refuses_before_tokenising(monkeypatch):
    engine = FakeEngine(max_queued=3)
    engine.counts.waiting = 3
    monkeypatch.setattr(engine.tokenizer, "encode", None)
    response = Client(engine).complete(prompt="a")
    assert error_of(response, 429)["code"] == "queue_full"
    assert response.headers["retry-after"] == "6"  # as the engine says


def test_tokenising_leaves_the_event_loop_free(engine, monkeypatch):
    """While a tokenizer is busy for as long as we like, probes answer and streams flow."""
    proceed, entered = threading.Event(), threading.Event()
    encode = engine.tokenizer.encode

    def slow(text, special=True, **kw):
        if text == "slow":
            entered.set()
            assert proceed.wait(60)
        return encode(text, special)

    monkeypatch.setattr(engine.tokenizer, "encode", lambda t, add_special_tokens=True: slow(t))

    async def scenario(client):
        slow_one = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "slow"}))
        await asyncio.to_thread(entered.wait, 60)
        assert (await client.get("/health")).status_code == 200
        body = {"prompt": "b", "stream": True}
        assert (await client.post("/v1/completions", json=body)).text.endswith("[DONE]\n\n")
        assert not slow_one.done()
        proceed.set()
        assert (await slow_one).status_code == 200

    talk(engine, scenario)


def start_stream(running):
    """A streaming request that has begun; returns a function that waits for its response."""
    running.engine.hold()
    result = {}

    def read():
        body = {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 5}
        result["answer"] = http.post(running.url + "/v1/completions", json=body)

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: len(running.engine.open) == 1)

    def finish():
        thread.join(60)
        return result["answer"]

    return finish


def test_first_signal_drains_and_keeps_answering(engine):
    with serving(engine, drain_timeout_s=60) as running:
        finish = start_stream(running)
        running.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: engine.state == "draining")
        assert http.get(running.url + "/ready").status_code == 503
        assert http.get(running.url + "/live").status_code == 200
        refused = http.post(running.url + "/v1/completions", json={"prompt": "b"})
        assert refused.status_code == 503 and refused.headers["connection"] == "close"
        engine.release()
        assert finish().text.endswith("data: [DONE]\n\n")
        running.thread.join(60)
        assert not running.thread.is_alive()
        assert running.server._captured_signals == [], "exit status 0, not a signal's"


def test_second_signal_aborts(engine):
    with serving(engine, drain_timeout_s=600) as running:
        finish = start_stream(running)
        running.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: engine.state == "draining")
        running.server.handle_exit(signal.SIGTERM, None)
        assert error_of(finish(), 503)["code"] == "shutting_down"
        running.thread.join(60)
        assert not running.thread.is_alive()


def test_drain_timeout_aborts(engine):
    with serving(engine, drain_timeout_s=0.1) as running:
        finish = start_stream(running)
        running.server.handle_exit(signal.SIGINT, None)
        assert error_of(finish(), 503)["code"] == "shutting_down"
        running.thread.join(60)
        assert not running.thread.is_alive()


def test_a_port_that_another_process_took_while_the_model_loaded(engine):
    with server_app.bind("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        late = server_app.bind("127.0.0.1", port)
        other.listen()
        for act in (
            lambda: server_app.bind("127.0.0.1", port),
            lambda: server_app.serve(engine, ServerConfig(port=port), late),
        ):
            with pytest.raises(OSError, match=f"127.0.0.1:{port}: Address already in use; try"):
                act()

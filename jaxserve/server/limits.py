"""Bounds on what a connection may cost, before any of it is parsed.

Two layers. GuardedProtocol sits under uvicorn's HTTP/1.1 parser: header size (431), slow headers
(408), connection count (503). Guard is the outermost ASGI layer: header count, readers that stop
reading, the request id. Bodies are read by read_body alone: size (413), chunk count (413) and time
(408) are checked while they stream in, so an unlimited body never fills memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid

import h11
import orjson
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from jaxserve.server.errors import ApiError, ClientGone, from_exception, quote

MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 128
MAX_CHUNKS = 65536  # separate pieces in which one body may trickle in
MAX_CONNECTIONS = 4096
KEEP_ALIVE_S = 30


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 connection with deadlines and OpenAI-shaped refusals.

    client_timeout_s: longest time a client may take to send its headers; set by app.serve.
    """

    client_timeout_s = 60.0
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        own = {"abort_connection": transport.abort, "flow": self.flow}
        self.app_state = {**self.app_state, **own}
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(ApiError(503, "Too many connections.", "overloaded", retry_after=1))
        else:
            self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _watch_headers(self) -> None:
        """Starts the clock when a request begins to arrive; stops it when its headers are whole."""
        waiting = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if not waiting:
            self._cancel_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.client_timeout_s, self._headers_too_slow)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_too_slow(self) -> None:
        self._header_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._refuse(ApiError(408, "The request's headers took too long.", "client_timeout"))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._cancel_header_timer()  # between requests the keep-alive timer rules

    def timeout_keep_alive_handler(self) -> None:
        """A peer that has not read its last answer by now never will: close would wait for it."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Called when h11 cannot parse; it says "receive buffer too long" of oversized headers."""
        data, _ = self.conn.trailing_data
        if len(data) > MAX_HEADER_BYTES:
            error = ApiError(431, "The request's headers are too large.", "headers_too_large")
        else:
            error = ApiError(400, "This is not a valid HTTP/1.1 request.", "invalid_http")
        self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        body = orjson.dumps(error.body())
        lines = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer is already on its way
            head = h11.Response(
                status_code=error.status, headers=lines, reason=STATUS_PHRASES[error.status]
            )
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Upgrades are simply not taken; a log line each would let strangers fill the disk."""


class Guard:
    """Outermost ASGI layer: request id, header bounds, an end to readers that stopped reading."""

    def __init__(self, app, client_timeout_s: float, count_response):
        """count_response(route template, status) is told of every response."""
        self.app = app
        self.client_timeout_s = client_timeout_s
        self.count_response = count_response

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = uuid.uuid4().hex
        state["arrived"] = time.monotonic()

        started = []

        async def bounded_send(message):
            if message["type"] == "http.response.start":
                extra = [
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
                started.append(True)
                self.count_response(route_of(scope), message["status"])
            flow = state.get("flow")
            if flow is not None and not flow.write_paused:
                return await send(message)  # a buffer takes it at once: no need for a clock
            try:
                async with asyncio.timeout(self.client_timeout_s):
                    await send(message)
            except TimeoutError:
                abort = state.get("abort_connection")
                if abort is not None:
                    abort()
                raise ClientGone from None

        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        try:
            if size > MAX_HEADER_BYTES or len(scope["headers"]) > MAX_HEADERS:
                message = "Too many or too large headers."
                raise ApiError(431, message, "headers_too_large", close=True)
            await self.app(scope, receive, bounded_send)
        except ClientGone:
            self.count_response(route_of(scope), 499)
        except Exception as error:
            if started:
                raise
            response = from_exception(error, request_id).response(scope["path"])
            await response(scope, receive, bounded_send)


def route_of(scope) -> str:
    """The path template that matched: one of few, whatever clients ask for."""
    return getattr(scope.get("route"), "path", "unmatched")


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises ApiError 413, 415 or 408, and ClientGone when it ends half-way."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        message = f"Content-Encoding {quote(encoding)} is not read here; send the body as it is."
        raise ApiError(415, message, "unsupported_encoding", close=True)
    declared = request.headers.get("content-length", "")
    too_large = ApiError(
        413, f"The body is larger than {max_bytes} bytes.", "body_too_large", close=True
    )
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    parts, size, more = [], 0, True
    try:
        async with asyncio.timeout(timeout_s):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > max_bytes or len(parts) > MAX_CHUNKS:
                    raise too_large
                more = message.get("more_body", False)
    except TimeoutError:
        message = f"The body did not arrive within {timeout_s:g} s."
        raise ApiError(408, message, "client_timeout", close=True) from None
    return b"".join(parts)


async def until_gone(receive) -> None:
    """Returns once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(request: Request, work):
    """Result of the coroutine `work`; if the client leaves first, ends it and raises ClientGone."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)

"""Server-sent events: chunks as bytes, and the response that sends them while a client listens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import orjson
from starlette.responses import Response

from jaxserve.server.errors import ClientGone, from_exception
from jaxserve.server.limits import until_gone

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx: pass each event on at once
}
DONE = b"data: [DONE]\n\n"
PING = b": still here\n\n"  # a comment line: clients skip it, proxies see life
PING_S = 15.0
# Refusals normally come at once and deserve their own status. After this long without news the
# stream opens with 200, so that no proxy gives up, and a later refusal arrives as an error event.
STATUS_WAIT_S = 5.0
# Line ends to Unicode, not to JSON or to event streams: clients that split text into lines would
# cut an event in two at one that a model says.
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}


def _json(content) -> bytes:
    data = orjson.dumps(content)
    if data.isascii():
        return data
    for end, escape in _LINE_ENDS.items():
        data = data.replace(end, escape)
    return data


def event(content, name: str | None = None) -> bytes:
    """One event with JSON content; name becomes its event type."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + _json(content) + b"\n\n"


class ChunkWriter:
    """Formats the chunks of one stream: the envelope once, each choice on its own."""

    def __init__(self, envelope: dict, **after_choices):
        self._envelope = envelope
        self._head = b"data: " + _json(envelope)[:-1] + b',"choices":['
        after = _json(after_choices)[1:-1]
        self._tail = b"]" + (b"," + after if after else b"") + b"}\n\n"

    def choice(self, content: dict) -> bytes:
        return self._head + _json(content) + self._tail

    def last(self, usage: dict) -> bytes:
        """The extra chunk before [DONE] that carries usage and no choice."""
        return event({**self._envelope, "choices": [], "usage": usage})


class EventStream(Response):
    """ASGI response that sends an async generator of byte chunks.

    The generator is closed, and so its requests are aborted, as soon as the client leaves or stops
    reading. An exception before the first chunk becomes an ordinary error response; one after it
    becomes an error event at the end of the stream. error_event formats that for other dialects.
    """

    def __init__(self, chunks: AsyncIterator[bytes], request_id: str, error_event=None):
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._chunks = chunks
        self._request_id = request_id
        self._error_event = error_event or (lambda error: event(error.body()))
        self._started = False
        self._silent = True  # nothing was sent since the last heartbeat
        self._sending = asyncio.Lock()  # heartbeats and chunks never interleave

    async def __call__(self, scope, receive, send) -> None:
        pump = asyncio.ensure_future(self._pump(scope, receive, send))
        helpers = [
            asyncio.ensure_future(until_gone(receive)),
            asyncio.ensure_future(self._beat(send)),
        ]
        try:
            await asyncio.wait({pump, *helpers}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pump, *helpers):
                task.cancel()
            await asyncio.gather(pump, *helpers, return_exceptions=True)
            await self._chunks.aclose()

    async def _pump(self, scope, receive, send) -> None:
        try:
            async for chunk in self._chunks:
                await self._send(send, chunk)
        except ClientGone:
            return
        except Exception as error:
            failure = from_exception(error, self._request_id)
            if not self._started:
                self._started = True
                return await failure.response(scope["path"])(scope, receive, send)
            await self._send(send, self._error_event(failure))
        await self._send(send, b"", more=False)

    async def _beat(self, send) -> None:
        """Opens a stream that has no news for long; writes a comment into each long silence."""
        with contextlib.suppress(ClientGone):
            await asyncio.sleep(STATUS_WAIT_S)
            while True:
                if self._silent:
                    await self._send(send, PING)
                self._silent = True
                await asyncio.sleep(PING_S)

    async def _send(self, send, data: bytes, more: bool = True) -> None:
        self._silent = False
        async with self._sending:
            if not self._started:
                self._started = True
                start = {"type": "http.response.start", "status": 200}
                await send({**start, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": more})

"""A streaming load client for any OpenAI-style server: one connection and one task a request.

Plain asyncio streams, because a client that works hard for each event measures itself. What a
server sends is read as far as the figures need it: which events bring tokens, and the usage.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping

import orjson

from jaxserve.bench.metrics import Record
from jaxserve.bench.workload import Item, Workload

_MAX_LINE = 1 << 20


class ApiError(Exception):
    """The server refused, or does not speak the protocol."""


@dataclasses.dataclass(frozen=True)
class Api:
    """A server and how to ask it. base_url: http(s)://host:port/v1."""

    base_url: str
    model: str = ""
    key: str | None = None
    extra: Mapping = dataclasses.field(default_factory=dict)  # joins every request's body
    send_text: bool = False
    timeout_s: float = 3600.0

    def body(self, item: Item) -> dict:
        if self.send_text and item.prompt is None:
            raise ValueError("--send_text: this workload has no texts; leave the flag out")
        return {
            "model": self.model,
            "prompt": item.prompt if self.send_text else list(item.prompt_ids),
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


async def first_model(api: Api) -> str:
    """Name of the first model the server lists."""
    async with _exchange(api, "GET", "/models") as reply:
        data = b"".join([part async for part in reply])
    return orjson.loads(data)["data"][0]["id"]


async def run(api: Api, workload: Workload, max_concurrency: int | None = None) -> list[Record]:
    """Sends the workload as it asks; records in the order of its items. A request that fails is
    recorded with its error and the rest go on."""
    gate = asyncio.Semaphore(max_concurrency or max(len(workload.items), 1))
    ended = {item.id: asyncio.Event() for item in workload.items}
    start = time.perf_counter()

    async def one(item: Item) -> Record:
        begin = start
        if item.after is not None:
            await ended[item.after].wait()
            begin = time.perf_counter()
        await asyncio.sleep(max(begin + item.arrival - time.perf_counter(), 0.0))
        async with gate:
            record = await _send(api, item)
        ended[item.id].set()
        return record

    return list(await asyncio.gather(*map(one, workload.items)))


async def _send(api: Api, item: Item) -> Record:
    body = orjson.dumps(api.body(item))
    record = Record(item.id, time.perf_counter(), item.max_tokens, len(item.prompt_ids))
    try:
        async with (
            asyncio.timeout(api.timeout_s),
            _exchange(api, "POST", "/completions", body) as reply,
        ):
            async for event in _events(reply):
                _note(record, event)
    except (ApiError, OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"[:300]
    return record


def _note(record: Record, data: bytes) -> None:
    """Takes an event in. Its time is taken first: parsing is the client's own."""
    now = time.perf_counter()
    event = orjson.loads(data)
    if event.get("error"):
        raise ApiError(str(event["error"])[:300])
    choices = event.get("choices")
    if choices and (choices[0].get("text") or choices[0].get("token_ids")):
        record.stamps.append(now)
        record.output_tokens += 1  # until the usage tells how many there were
    if usage := event.get("usage"):
        record.output_tokens = usage["completion_tokens"]
        record.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens") or 0


# ---- as much HTTP/1.1 as it takes ---------------------------------------------------------------


class _exchange:
    """Sends one request; entering gives its body's parts as they arrive. ApiError for a status that
    is not 200. One connection each: what a keep-alive pool saves is not what is measured here."""

    def __init__(self, api: Api, method: str, path: str, body: bytes = b""):
        self._url = urllib.parse.urlsplit(api.base_url.rstrip("/") + path)
        key = f"Authorization: Bearer {api.key}\r\n" if api.key else ""
        self._head = (
            f"{method} {self._url.path} HTTP/1.1\r\nHost: {self._url.netloc}\r\n{key}"
            "Content-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        self._body = body

    async def __aenter__(self) -> AsyncIterator[bytes]:
        secure = self._url.scheme == "https"
        port = self._url.port or (443 if secure else 80)
        context = ssl.create_default_context() if secure else None
        reader, self._writer = await asyncio.open_connection(
            self._url.hostname, port, ssl=context, limit=_MAX_LINE
        )
        self._writer.write(self._head + self._body)
        status = (await reader.readline()).split()
        if len(status) < 2 or not status[0].startswith(b"HTTP/"):
            raise ApiError("not an HTTP server")
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip().lower()
        parts = _parts(reader, headers)
        if status[1] != b"200":
            text = b"".join([part async for part in parts])
            raise ApiError(f"{status[1].decode()}: {text.decode(errors='replace')[:300]}")
        return parts

    async def __aexit__(self, *_) -> None:
        self._writer.close()


async def _parts(reader: asyncio.StreamReader, headers: dict) -> AsyncIterator[bytes]:
    if headers.get(b"transfer-encoding") == b"chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif b"content-length" in headers:
        yield await reader.readexactly(int(headers[b"content-length"]))
    else:
        while part := await reader.read(_MAX_LINE):
            yield part


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Data of server-sent events, each on one line as OpenAI's servers send it, up to [DONE]."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data

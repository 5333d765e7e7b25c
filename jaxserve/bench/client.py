"""A streaming load client for any OpenAI-style server: one connection and one task a request.

What arrives is read where it arrives, in the protocol's callback, because a client that works hard
for each event measures itself: with asyncio's streams and a task that wakes up, an event takes
twice as long. What a server sends is read as far as the figures need it: which events bring tokens,
and the usage. An answer counts as served when it says so itself: a stream that breaks off has
failed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping

import httptools
import orjson

from jaxserve.bench.metrics import Record
from jaxserve.bench.workload import Item, Workload

_MAX_LINE = 1 << 20  # bytes: of the headers, of an event
_ASKING_S, _MAX_ANSWER = 20.0, 16 << 20  # seconds, bytes: for what a server can say at once
_DONE = b"[DONE]"


class ApiError(ValueError):
    """The server refused, or does not speak the protocol."""


@dataclasses.dataclass(frozen=True)
class Api:
    """A server and how to ask it. base_url: http(s)://host:port/v1.

    chat asks /chat/completions, where a prompt is a user's message; else /completions, where it is
    token ids, or with send_text a text. count_tokens counts those of a text, for servers that do
    not say how many they sent; without it an event counts as one.
    """

    base_url: str
    model: str = ""
    key: str | None = None
    extra: Mapping = dataclasses.field(default_factory=dict)  # joins every request's body
    send_text: bool = False
    chat: bool = False
    timeout_s: float = 3600.0  # of one request
    count_tokens: Callable[[str], int] | None = None

    def __post_init__(self):
        url = urllib.parse.urlsplit(self.base_url)
        if self.base_url and (url.scheme not in ("http", "https") or not url.hostname):
            raise ValueError(f"--base_url={self.base_url}: give it as http://HOST:PORT/v1")

    @property
    def root(self) -> Api:
        """The same server without base_url's path: where it tells of itself."""
        url = urllib.parse.urlsplit(self.base_url)
        return dataclasses.replace(self, base_url=f"{url.scheme}://{url.netloc}")

    @property
    def path(self) -> str:
        return "/chat/completions" if self.chat else "/completions"

    def body(self, item: Item) -> dict:
        if self.chat:
            prompt = {"messages": [{"role": "user", "content": item.prompt}]}
        else:
            prompt = {"prompt": item.prompt if self.send_text else list(item.prompt_ids)}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


async def read(api: Api, path: str) -> bytes:
    """What is at a path below base_url. ApiError for more than a server has to say at once."""
    answer = bytearray()

    def take(part: bytes) -> None:
        answer.extend(part)
        if len(answer) > _MAX_ANSWER:
            raise ApiError(f"an answer of more than {_MAX_ANSWER} bytes")

    await _exchange(api, "GET", path, take, _ASKING_S)
    return bytes(answer)


async def get(api: Api, path: str) -> dict:
    """The JSON object at a path below base_url."""
    answer = orjson.loads(await read(api, path))
    if not isinstance(answer, dict):
        raise ApiError("the answer is no JSON object")
    return answer


async def first_model(api: Api) -> str:
    """Name of the first model the server lists."""
    try:
        return str((await get(api, "/models"))["data"][0]["id"])
    except TimeoutError:
        reason = f"nothing within {_ASKING_S:.0f} s"
    except (KeyError, IndexError, TypeError):
        reason = "no list of models"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise ApiError(
        f"{api.base_url}/models: {reason}; is a server there, and does --base_url end as its paths "
        "begin (mostly /v1)? --api_model=NAME goes without the list"
    )


async def run(
    api: Api,
    workload: Workload,
    max_concurrency: int | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Sends the workload as it asks; records in the order of its items. A request that fails is
    recorded with its error and the rest go on. on_end() is called after each."""
    gate = asyncio.Semaphore(max_concurrency or max(len(workload.items), 1))
    ended = {item.id: asyncio.Event() for item in workload.items}
    start = time.perf_counter()

    async def one(item: Item) -> _Answer:
        begin = start
        if item.after is not None:
            await ended[item.after].wait()
            begin = time.perf_counter()
        await asyncio.sleep(max(begin + item.arrival - time.perf_counter(), 0.0))
        async with gate:
            answer = await _send(api, item)
        ended[item.id].set()
        on_end()
        return answer

    answers = await asyncio.gather(*map(one, workload.items))
    for answer in answers:
        answer.count(api.count_tokens)  # only now: it takes time that streams would wait for
    return [answer.record for answer in answers]


async def _send(api: Api, item: Item) -> _Answer:
    body = orjson.dumps(api.body(item))
    record = Record(item.id, time.perf_counter(), item.max_tokens, len(item.prompt_ids))
    answer = _Answer(record)
    try:
        await _exchange(api, "POST", api.path, answer.feed, api.timeout_s, body)
        answer.end(time.perf_counter())
    except TimeoutError:
        record.error = f"not done after {api.timeout_s:g} s"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        record.error = f"{type(error).__name__}: {error}"[:300]
    return answer


class _Answer:
    """What a stream has told so far, as its request's record."""

    def __init__(self, record: Record):
        self.record = record
        self._texts: list[str] = []
        self._rest = b""  # of the body: a line that has only begun
        self._is_whole = self._is_counted = False

    def feed(self, part: bytes) -> bool:
        """Takes in some of the body, server-sent events each on one line as OpenAI's servers send
        them. Whether that was all: [DONE] has come."""
        now = time.perf_counter()  # before parsing, which is the client's own
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == _DONE:
                    self._is_whole = True
                    return True
                self._take(orjson.loads(data), now)
        if len(self._rest) > _MAX_LINE:
            raise ApiError("a line without an end")
        return False

    def _take(self, event: dict, now: float) -> None:
        """Notes an event that came at `now`. ApiError when it says that the request failed."""
        if event.get("error"):
            raise ApiError(str(event["error"])[:300])
        for choice in (event.get("choices") or ())[:1]:
            text = _text_of(choice)
            if text or choice.get("token_ids"):
                self.record.stamps.append(now)
                self._texts.append(text)
            self._is_whole |= choice.get("finish_reason") is not None
        if usage := event.get("usage"):
            self._note_usage(usage)

    def _note_usage(self, usage: dict) -> None:
        record = self.record
        record.output_tokens = int(usage["completion_tokens"])
        record.prompt_tokens = int(usage["prompt_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens") or 0
        self._is_counted = True

    def end(self, now: float) -> None:
        """Called after the last event. ApiError for an answer that is cut short, or empty."""
        if not self._is_whole:
            raise ApiError("the stream broke off before the answer's end")
        if not self.record.stamps and not self.record.output_tokens:
            raise ApiError("the answer has no tokens")
        if not self.record.stamps:  # all of them without a text, as control tokens are
            self.record.stamps.append(now)

    def count(self, count_tokens: Callable[[str], int] | None) -> None:
        """Tokens of an answer whose server did not say."""
        record = self.record
        if not self._is_counted:
            record.estimated = True
            record.output_tokens = len(record.stamps)
            if count_tokens is not None and record.stamps:
                record.output_tokens = max(count_tokens("".join(self._texts)), 1)


def _text_of(choice: dict) -> str:
    """New text of a completion's choice, or of a chat's, thinking and all."""
    delta = choice.get("delta") or choice
    names = ("text", "content", "reasoning_content", "reasoning")
    return "".join(delta.get(name) or "" for name in names)


# ---- HTTP/1.1 -----------------------------------------------------------------------------------


async def _exchange(
    api: Api,
    method: str,
    path: str,
    take: Callable[[bytes], bool | None],
    timeout_s: float,
    body: bytes = b"",
) -> None:
    """Sends one request and gives take() its answer's parts as they arrive, until one is said to be
    the last. ApiError for a status that is not 200; TimeoutError after timeout_s. One connection
    each: what a keep-alive pool saves is not what is measured here."""
    url = urllib.parse.urlsplit(api.base_url.rstrip("/") + path)
    key = f"Authorization: Bearer {api.key}\r\n" if api.key else ""
    head = (
        f"{method} {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\n{key}"
        "Content-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    secure = url.scheme == "https"
    port = url.port or (443 if secure else 80)
    context = ssl.create_default_context() if secure else None
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        transport, reply = await loop.create_connection(
            lambda: _Reply(take, loop.create_future()), url.hostname, port, ssl=context
        )
        try:
            transport.write(head + body)
            await reply.whole
        finally:
            transport.close()


class _Reply(asyncio.Protocol):
    """An answer while it arrives. take(part) gets the parts of its body, if its status is 200, and
    says of the last one that it is. `whole` is done when nothing more is to come, or has failed."""

    def __init__(self, take: Callable[[bytes], bool | None], whole: asyncio.Future):
        self.whole = whole
        self._take = take
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes: int | None = 0  # so far; None: the head is read
        self._until_closed = True  # where the body tells neither its length nor its end
        self._status = 200
        self._refusal = b""  # the body of another status, as much of it as is shown

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(ApiError(f"not an HTTP server, or a broken answer: {error}"))
        if (self._head_bytes or 0) > _MAX_LINE:
            self._end(ApiError("headers without an end"))

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and (self._head_bytes is not None or not self._until_closed):
            error = ApiError("the connection closed in the middle of an answer")
        self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        if self.whole.done():
            return
        if error is None and self._status != 200:
            error = ApiError(f"{self._status}: {self._refusal.decode(errors='replace')[:300]}")
        if error is None:
            self.whole.set_result(None)
        else:
            self.whole.set_exception(error)

    # What the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_closed = False

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._status = self._parser.get_status_code()
        if self._status != 200:
            self._take = self._take_refusal

    def _take_refusal(self, part: bytes) -> bool:
        self._refusal += part
        return len(self._refusal) > 1200  # 300 characters, of four bytes at most

    def on_body(self, part: bytes) -> None:
        if self.whole.done():
            return
        try:
            if self._take(part):
                self._end()
        except Exception as error:  # whatever it is, the request has failed by it
            self._end(error)

    def on_message_complete(self) -> None:
        self._end()

"""The load client against a server that answers from a script, over real sockets."""

import asyncio
import json

import pytest

from jaxserve.bench import client, serve
from jaxserve.bench.client import Api
from jaxserve.bench.workload import Item, Workload

ITEMS = (Item("a", (1, 2, 3), 2), Item("b", (4, 5), 2, after="a"), Item("c", (6,), 2))
EVENTS = [
    {"choices": [{"text": "x"}]},
    {"choices": [{"text": "yz"}]},
    {"choices": [{"text": "", "finish_reason": "length"}]},
    {
        "choices": [],
        "usage": {
            "completion_tokens": 2,
            "prompt_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    },
]


def stream_of(events) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    return b"".join([*lines, b"data: [DONE]\n\n"])


class Server:
    """Answers every request with `reply`, and keeps what it was asked."""

    def __init__(self, reply: bytes):
        self.reply = reply
        self.asked = []

    async def answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = await reader.readexactly(size)
        self.asked.append((head, json.loads(body) if body else None))
        writer.write(self.reply)
        await writer.drain()
        writer.close()


def served(reply: bytes, work):
    """Runs work(api) against a server; (its result, what was asked)."""

    async def main():
        server = Server(reply)
        async with await asyncio.start_server(server.answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            api = Api(f"http://127.0.0.1:{port}/v1", "m", key="k", extra={"cache_prompt": False})
            return await work(api), server.asked

    return asyncio.run(main())


def chunked(data: bytes, size: int) -> bytes:
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body


PLAIN = b"HTTP/1.1 200 OK\r\n\r\n" + stream_of(EVENTS)  # ends with the connection


@pytest.mark.parametrize(
    "reply", [PLAIN, chunked(stream_of(EVENTS), 7), chunked(stream_of(EVENTS), 999)]
)
def test_events_in_any_framing(reply):
    records, asked = served(reply, lambda api: client.run(api, Workload("w", ITEMS)))
    assert [record.id for record in records] == ["a", "b", "c"]
    for record in records:
        assert record.good and len(record.stamps) == 2  # two events brought text
        assert (record.output_tokens, record.prompt_tokens, record.cached_tokens) == (2, 3, 1)
        assert record.sent <= record.stamps[0] <= record.stamps[1]
    assert records[1].sent >= records[0].stamps[-1]  # b waits for a
    head, body = asked[0]
    assert "Authorization: Bearer k" in head
    assert body["prompt"] == [1, 2, 3] and body["max_tokens"] == 2 and body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True} and body["cache_prompt"] is False


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy", "ApiError: 503: busy"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + stream_of([{"error": {"message": "no"}}]), "no"),
        (b"SSH-2.0\r\n\r\n", "not an HTTP server"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {broken\n\n", "JSONDecodeError"),
        (chunked(stream_of(EVENTS), 50)[:90], "IncompleteReadError"),
    ],
)
def test_failures_are_recorded(reply, error):
    records, _ = served(reply, lambda api: client.run(api, Workload("w", ITEMS[:1])))
    assert not records[0].good and error in records[0].error


def test_first_model():
    data = b'{"data": [{"id": "tiny"}, {"id": "other"}]}'
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)
    assert served(reply, client.first_model)[0] == "tiny"


def test_runs_share_no_prompt_but_keep_shared_prefixes():
    items = (Item("a", (5, 6, 7), 1), Item("b", (5, 6, 8), 1))
    first, second = (serve.unseen(Workload("w", items)) for _ in range(2))
    assert first.items[0].prompt_ids[:2] == first.items[1].prompt_ids[:2]
    assert first.items[0].prompt_ids[0] != second.items[0].prompt_ids[0]
    assert [len(item.prompt_ids) for item in first.items] == [3, 3]

"""The load client against a server that answers from a script, over real sockets."""

import asyncio
import dataclasses
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
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "a broken answer"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\n\r\n" + bytes(client._MAX_LINE + 1), "without an end", id="endless"
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nX: " + bytes(client._MAX_LINE).replace(b"\0", b"x"),
            "headers without",
            id="endless head",
        ),
        (chunked(stream_of(EVENTS), 50)[:90], "closed in the middle"),
        (chunked(stream_of(EVENTS[:2]), 5)[: 47 + 50], "closed in the middle"),  # between chunks
        (b"HTTP/1.1 200 OK\r\n\r\n" + stream_of(EVENTS[:2])[:-14], "broke off"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + stream_of(EVENTS[2:3]), "no tokens"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + stream_of([*EVENTS[:3], {"usage": {"x": 1}}]), "KeyError"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + stream_of([["x"]]), "AttributeError"),
    ],
)
def test_failures_are_recorded(reply, error):
    records, _ = served(reply, lambda api: client.run(api, Workload("w", ITEMS[:1])))
    assert not records[0].good and error in records[0].error


def test_end_without_done_is_an_end():
    """Some servers only say why they stopped."""
    reply = b"HTTP/1.1 200 OK\r\n\r\n" + stream_of(EVENTS[:3])[: -len(b"data: [DONE]\n\n")]
    (record,), _ = served(reply, lambda api: client.run(api, Workload("w", ITEMS[:1])))
    assert record.good and record.output_tokens == 2


@pytest.mark.parametrize(("count", "tokens"), [(None, 2), (len, 3)])
def test_tokens_that_no_usage_counts(count, tokens):
    """Two events bring "x" and "yz": counted as two, or by what counts their text."""
    reply = b"HTTP/1.1 200 OK\r\n\r\n" + stream_of(EVENTS[:3])

    def work(api):
        api = dataclasses.replace(api, count_tokens=count)
        return client.run(api, Workload("w", ITEMS[:1]))

    (record,), _ = served(reply, work)
    assert record.good and record.estimated and record.output_tokens == tokens


def test_tokens_without_text_are_served():
    reply = b"HTTP/1.1 200 OK\r\n\r\n" + stream_of(EVENTS[2:])
    (record,), _ = served(reply, lambda api: client.run(api, Workload("w", ITEMS[:1])))
    assert record.good and len(record.stamps) == 1 and not record.estimated


def test_chat():
    deltas = ({"role": "assistant", "content": ""}, {"reasoning_content": "x"}, {"content": "yz"})
    chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    reply = b"HTTP/1.1 200 OK\r\n\r\n" + stream_of([*chunks, *EVENTS[2:]])
    item = dataclasses.replace(ITEMS[0], prompt="a b")

    def work(api):
        return client.run(dataclasses.replace(api, chat=True), Workload("w", (item,)))

    (record,), ((head, body),) = served(reply, work)
    assert record.good and len(record.stamps) == 2  # the role is no token
    assert head.startswith("POST /v1/chat/completions ")
    assert body["messages"] == [{"role": "user", "content": "a b"}] and "prompt" not in body


def test_silence_is_a_failure():
    async def main():
        gone = asyncio.Event()

        async def answer(reader, writer):
            await gone.wait()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            api = Api(f"http://127.0.0.1:{port}/v1", "m", timeout_s=0.05)
            records = await client.run(api, Workload("w", ITEMS))
            gone.set()
            return records

    records = asyncio.run(main())
    assert [record.error for record in records] == ["not done after 0.05 s"] * 3


def test_each_end_is_told():
    ends = []
    told = lambda api: client.run(api, Workload("w", ITEMS), None, lambda: ends.append(1))
    served(PLAIN, told)
    assert len(ends) == 3


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://host/v1", "http:///v1"])
def test_addresses_are_checked(url):
    with pytest.raises(ValueError, match="--base_url"):
        Api(url)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "no list of models"),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", "no JSON object"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nno", "404: no"),
        (b"SSH-2.0\r\n\r\n", "not an HTTP server"),
        (b"", "closed in the middle"),
        (b"HTTP/1.1 101 Go\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n", "101: "),
        (b"HTTP/1.1 500 No\r\n\r\n" + b"x" * 9999, f"500: {300 * 'x'}"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(17 << 20), "an answer of more", id="flood"),
    ],
)
def test_servers_without_a_model_list(reply, reason):
    with pytest.raises(ValueError, match=rf"/v1/models: .*{reason}.*--api_model"):
        served(reply, client.first_model)


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

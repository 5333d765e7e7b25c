"""Offline batches in OpenAI's batch format, through the same endpoints as over HTTP.

Each input line is {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body": {...}};
each output line is {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}.
Lines are written as they finish, whole and flushed, so a run that was stopped goes on where it was:
custom_ids that the output file has already are skipped, and a torn last line is dropped. A file
that holds anything else is not touched.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import pathlib
import uuid
from collections.abc import Callable, Iterator, Sequence

import orjson

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from jaxserve.types import EngineFailed

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
BEGINNING = b'{"id":"batch_req_'  # of every output line


def run(
    lines: Sequence[dict],
    target: pathlib.Path,
    engine,
    *,
    in_flight: int | None = None,
    progress: Callable[[str, int, int], None] = lambda item, done, total: None,
) -> int:
    """Runs every line (of read_lines) that target lacks; the number of failures in target then,
    those of earlier runs too.

    in_flight: lines at once; default: what the engine's queue takes. progress(custom_id, done,
    total) is called after each line. Raises EngineFailed when the engine has ended; what is in
    target then stays.
    """
    return asyncio.run(_run(lines, target, engine, in_flight, progress))


async def _run(lines, target, engine, in_flight, progress) -> int:
    earlier = repair(target)
    lines = [line for line in lines if line["custom_id"] not in earlier]
    # No client to protect against here: a line may be as long and take as long as it needs.
    config = ServerConfig(max_body_bytes=1 << 30, request_timeout_s=7 * 24 * 3600.0)
    app = create_app(engine, config)
    limit = in_flight or max(1, min(engine.config.max_queued // 2, 256))
    slots, failed, done = asyncio.Semaphore(limit), sum(earlier.values()), 0
    with target.open("ab") as output:

        async def one(line: dict) -> None:
            nonlocal failed, done
            result = await answer(app, line)
            output.write(orjson.dumps(result) + b"\n")
            output.flush()
            failed += _failed(result)
            done += 1
            progress(line["custom_id"], done, len(lines))
            slots.release()

        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    await slots.acquire()
                    group.create_task(one(line))
        except* EngineFailed as errors:
            raise errors.exceptions[0] from None
    return failed


def read_lines(source: pathlib.Path) -> Iterator[dict]:
    """The request lines, checked. Raises ValueError with the line's number."""
    seen = set()
    with source.open("rb") as file:
        for number, text in enumerate(file, start=1):
            text = text.removeprefix(codecs.BOM_UTF8)
            if not text.strip():
                continue
            where = f"{source.name}:{number}"
            try:
                line = orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON: {error}") from None
            if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str):
                raise ValueError(f"{where} has no custom_id")
            if line["custom_id"] in seen:
                raise ValueError(f"{where}: custom_id {line['custom_id']!r} came before")
            if line.get("method", "POST") != "POST" or line.get("url") not in URLS:
                raise ValueError(f"{where}: url must be one of {', '.join(URLS)}, with POST")
            if not isinstance(line.get("body"), dict) or line["body"].get("stream"):
                raise ValueError(f"{where}: body must be an object, without stream")
            seen.add(line["custom_id"])
            yield line


def check_target(target: pathlib.Path) -> tuple[dict[str, bool], int]:
    """custom_ids that target has, and whether they failed; and its length without a last line that
    a stop left unfinished. A pipe or a terminal has none. Raises ValueError for a file that is no
    output of a batch: nobody wants it cut."""
    failed, whole = {}, 0
    if not target.is_file():
        return failed, whole
    with target.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if text.endswith(b"\n"):
                with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
                    line = orjson.loads(text)
                    failed[line["custom_id"]] = _failed(line)
                    whole += len(text)
                    continue
            elif text[: len(BEGINNING)] == BEGINNING[: len(text)]:
                break
            raise ValueError(
                f"{target.name}:{number} is no answer of a batch: name another file for answers"
            )
    return failed, whole


def repair(target: pathlib.Path) -> dict[str, bool]:
    """As check_target, and the unfinished line is cut off."""
    failed, whole = check_target(target)
    if target.is_file():
        os.truncate(target, whole)
    return failed


def _failed(result: dict) -> bool:
    return result["response"]["status_code"] != 200


async def answer(app, line: dict) -> dict:
    """The output line of one input line. Waits while the engine's queue is full."""
    pause_s = 0.05
    while True:
        status, request_id, body = await call(app, line["url"], orjson.dumps(line["body"]))
        if status == 503:
            raise EngineFailed(orjson.loads(body)["error"]["message"])
        if status != 429:
            break
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 5.0)
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line["custom_id"],
        "response": {"status_code": status, "request_id": request_id, "body": orjson.loads(body)},
        "error": None,
    }


async def call(app, path: str, body: bytes) -> tuple[int, str, bytes]:
    """POSTs to the application without a socket: (status, request id, body)."""
    unread, parts, head = [body], [], {}

    async def receive():
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # this client never leaves

    async def send(message):
        if message["type"] == "http.response.start":
            head["status"] = message["status"]
            head["id"] = dict(message["headers"]).get(b"x-request-id", b"").decode()
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "headers": [], "client": None, "server": None,
        "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    return head["status"], head["id"], b"".join(parts)

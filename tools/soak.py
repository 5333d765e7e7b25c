"""Soak: hours of ordinary and bad behaviour in minutes, then the books are checked.

    python tools/soak.py --minutes=10            # starts `jaxserve serve` itself
    python tools/soak.py --url=http://host:8000  # against a server that runs nothing else

Clients send prompts of random length to both endpoints, streamed and not. A share leaves early
(while queued, in prefill, in decode), a share reads slowly, a share sends rubbish. Afterwards:
no 5xx, no stuck request, every page and slot free, every accepted request ended exactly once, every
answer's usage equal to the tokens it carried, resident memory flat in the second half, nothing
compiled after warm-up. Exit status 1 and a list of what failed otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import random
import socket
import subprocess
import sys
import time

import httpx
import numpy as np

WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "🙂", "žluť",
)  # fmt: skip
SAMPLE_S = 5.0  # between readings of memory
PATIENCE_S = 300.0  # of a client that means to stay
IDLE_S = 10.0  # after the last answer, how long pages may stay taken
RUBBISH = (
    b"", b"{", b"[" * 5000, b'{"prompt": NaN}', b'{"prompt": [-1]}', b'{"prompt": "a", "n": 0}',
    b'{"prompt": ["a"], "temperature": "hot"}', b'{"prompt": "a", "logprobs": 99}', b"\xff\xfe",
    b'{"prompt": "a", "unheard_of": 1}', b'{"prompt": "' + b"a" * 2_000_000 + b'"}',
    b'{"prompt": "a", "logit_bias": {"x": 1}}', b'{"model": "other", "prompt": "a"}',
)  # fmt: skip

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
FORMS = (
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
    {"guided_regex": "[a-z ]{5,40}"},
    {"guided_choice": ["yes", "no", "perhaps"]},
    {"guided_grammar": 'start: e\ne: e e | "xQ" | "yK"'},  # its masks take longer and longer
)


class Books:
    """What the clients saw, to be compared with what the server says."""

    def __init__(self):
        self.outcomes = collections.Counter()
        self.faults: list[str] = []
        self.memory: list[tuple[float, float]] = []  # (seconds, MB)

    def fault(self, text: str) -> None:
        self.faults.append(text)
        print("FAULT:", text, flush=True)

    def check_status(self, status: int, what: str) -> None:
        self.outcomes[status] += 1
        if status >= 500:
            self.fault(f"{what} was answered with {status}")


def made_up_request(rng: random.Random, grammar_rate: float) -> tuple[str, dict]:
    """(path, body) of a valid request. grammar_rate: the share that asks for a form."""
    text = " ".join(rng.choices(WORDS, k=int(2 ** rng.uniform(0, 8.5))))
    limit = int(2 ** rng.uniform(0, 6.5))
    body = {"max_tokens": limit, "stream": rng.random() < 0.5, "temperature": rng.choice([0, 1])}
    if rng.random() < 0.3:
        body |= {"seed": rng.randrange(100), "top_p": 0.9, "presence_penalty": 0.5}
    if rng.random() < grammar_rate:
        body |= rng.choice(FORMS)
    elif rng.random() < 0.5:
        body["ignore_eos"] = True
    if rng.random() < 0.2:
        body["n"] = 2
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.5:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    if rng.random() < 0.3:
        body["logprobs"] = rng.randrange(5)
    return "/v1/completions", body | {"prompt": text}


async def ask(client: httpx.AsyncClient, path: str, body: dict, books: Books, pause: float) -> None:
    """One request to its end; checks usage and finish reasons. pause: seconds between reads."""
    usage, reasons, scored = None, [], 0
    async with client.stream("POST", path, json=body) as answer:
        books.check_status(answer.status_code, path)
        if answer.status_code != 200:
            await answer.aread()
            if answer.status_code != 429:
                books.fault(f"{path} {answer.status_code}: {answer.text[:200]}")
            return
        async for chunk in _chunks(answer, body["stream"], pause):
            if "error" in chunk:
                return books.fault(f"error in a stream: {chunk['error']}")
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                scored += len((choice.get("logprobs") or {}).get("tokens", ()))
    n = body.get("n", 1)
    if len(reasons) != n or usage is None:
        return books.fault(f"{path} ended with {reasons} for n={n}, usage {usage}")
    books.outcomes["completed"] += 1
    books.outcomes["completion_tokens"] += usage["completion_tokens"]
    books.outcomes["prompt_tokens"] += usage["prompt_tokens"] * n
    if "logprobs" in body and scored != usage["completion_tokens"]:
        books.fault(f"{scored} scored tokens, usage says {usage['completion_tokens']}")
    if body.get("ignore_eos") and usage["completion_tokens"] != n * body["max_tokens"]:
        books.fault(f"asked for {n} x {body['max_tokens']}, usage {usage}, reasons {reasons}")


async def _chunks(answer: httpx.Response, streamed: bool, pause: float):
    if not streamed:
        yield json.loads(await answer.aread())
        return
    last = None
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            await asyncio.sleep(pause)
            last = line[6:]
            if last != "[DONE]":
                yield json.loads(last)
    if last != "[DONE]":
        yield {"error": "the stream ended without [DONE]"}


async def one_client(
    client, rng: random.Random, books: Books, end: float, manners, grammar_rate: float
) -> None:
    """Asks until `end`. manners: the shares of bad behaviour, or None for none."""
    while time.monotonic() < end:
        dice = rng.random() if manners else 1.0
        rubbish = manners and dice < manners.bad_rate
        leaves = manners and not rubbish and dice < manners.bad_rate + manners.abort_rate
        patience = 2 ** rng.uniform(-6, 2) if leaves else PATIENCE_S
        path, body = made_up_request(rng, grammar_rate)
        pause = 0.2 if manners and rng.random() < manners.slow_rate else 0.0
        try:
            async with asyncio.timeout(patience):
                if rubbish:
                    await send_rubbish(client, rng.choice(RUBBISH), books)
                else:
                    await ask(client, path, body, books, pause)
        except TimeoutError:
            books.outcomes["left"] += 1
            if not leaves:
                books.fault(f"{path} did not end within {patience} s")
        except httpx.HTTPError as error:
            books.fault(f"{path}: {type(error).__name__}: {error}")


async def send_rubbish(client: httpx.AsyncClient, content: bytes, books: Books) -> None:
    answer = await client.post("/v1/completions", content=content)
    books.check_status(answer.status_code, "rubbish")
    if not 400 <= answer.status_code < 500:
        books.fault(f"rubbish was answered with {answer.status_code}")


async def metrics_of(client) -> dict[str, float]:
    """jaxserve's own series without labels, and the request ends by reason."""
    text = (await client.get("/metrics")).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#"]
    return {name.removeprefix("jaxserve:"): float(value) for name, value in lines}


async def watch_memory(client, books: Books) -> None:
    start = time.monotonic()
    while True:
        metrics = await metrics_of(client)
        resident = metrics["process_resident_memory_bytes"] / 2**20
        books.memory.append((time.monotonic() - start, resident))
        health = await client.get("/health")
        books.check_status(health.status_code, "/health")
        await asyncio.sleep(SAMPLE_S)


async def until_idle(client, books: Books) -> dict[str, float]:
    """Metrics once nothing runs; a fault when pages stay taken."""
    end = time.monotonic() + IDLE_S
    while time.monotonic() < end:
        metrics = await metrics_of(client)
        busy = metrics["num_requests_running"] + metrics["num_requests_waiting"]
        if not busy and metrics["kv_pages_free"] == metrics["kv_pages_total"]:
            return metrics
        await asyncio.sleep(0.1)
    free, total = metrics["kv_pages_free"], metrics["kv_pages_total"]
    books.fault(
        f"not idle after {IDLE_S:g} s: {busy:.0f} requests, {free:.0f} of {total:.0f} pages"
    )
    return metrics


def memory_slope(samples: list[tuple[float, float]]) -> float:
    """MB per minute over the second half, by least squares; 0 for too few samples."""
    half = samples[len(samples) // 2 :]
    if len(half) < 4:
        return 0.0
    seconds, megabytes = np.array(half).T
    return float(np.polyfit(seconds / 60, megabytes, 1)[0])


def check_ends(before: dict, after: dict, books: Books) -> None:
    """Every accepted request ended exactly once."""
    name = 'request_success_total{finished_reason="%s"}'
    reasons = ("stop", "length", "abort", "timeout", "error")
    ends = {r: after.get(name % r, 0) - before.get(name % r, 0) for r in reasons}
    finished, completed = ends["stop"] + ends["length"], books.outcomes["completed"]
    print("ends at the server:", {r: int(n) for r, n in ends.items()})
    if ends["error"]:
        books.fault(f"{ends['error']:.0f} requests ended with an error")
    if not completed <= finished <= completed + books.outcomes["left"]:
        books.fault(f"clients saw {completed} requests finish, the server {finished:.0f}")
    if after["compilations_total"]:
        books.fault(f"{after['compilations_total']:.0f} compilations after warm-up")


async def audit(client, books: Books, before: dict, options) -> None:
    """A short time of good behaviour, after which all counters must agree to the token."""
    quiet = Books()
    end, rate = time.monotonic() + min(30.0, 6 * options.minutes), options.grammar_rate
    rngs = [random.Random(f"audit {options.seed} {i}") for i in range(8)]
    await asyncio.gather(*[one_client(client, rng, quiet, end, None, rate) for rng in rngs])
    after = await until_idle(client, quiet)
    grown = lambda name: int(after[name] - before[name])
    for name, seen in (
        ("generation_tokens_total", quiet.outcomes["completion_tokens"]),
        ("prompt_tokens_total", quiet.outcomes["prompt_tokens"]),
        ("requests_total", quiet.outcomes["completed"]),
    ):
        if grown(name) != seen:
            quiet.fault(f"clients counted {seen}, the server's {name} grew by {grown(name)}")
    books.faults += quiet.faults


async def soak(url: str, options) -> int:
    """Runs it all and prints the result; the exit status."""
    books = Books()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
        before = await metrics_of(client)
        watching = asyncio.ensure_future(watch_memory(client, books))
        end = time.monotonic() + 60 * options.minutes
        rngs = [random.Random(f"{options.seed} {i}") for i in range(options.clients)]
        rate = options.grammar_rate
        await asyncio.gather(*[one_client(client, rng, books, end, options, rate) for rng in rngs])
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        after = await until_idle(client, books)
        check_ends(before, after, books)
        await audit(client, books, after, options)
    slope = memory_slope(books.memory)
    if slope > options.max_slope_mb_per_min:
        books.fault(f"memory grew by {slope:.2f} MB/min in the second half")
    print("outcomes:", dict(sorted(books.outcomes.items(), key=str)))
    first, last = books.memory[0][1], books.memory[-1][1]
    print(f"memory: {first:.0f} to {last:.0f} MB, slope {slope:.2f} MB/min in the second half")
    print(f"{len(books.faults)} faults" if books.faults else "all promises held")
    return 1 if books.faults else 0


@contextlib.contextmanager
def own_server(model: str):
    """URL of a server started for this run; it must stop cleanly at the end.

    A small KV pool, so that kept prefixes soon have to make room.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jaxserve.main", "serve", "--kv_memory_gib=0.4"]
    process = subprocess.Popen([*command, f"--model={model}", f"--port={port}"])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url + "/ready").status_code == 200:
                    break
            if process.poll() is not None:
                raise SystemExit(f"the server ended with status {process.returncode}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        if process.wait(60) != 0:
            raise SystemExit(f"FAULT: the server's exit status is {process.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option("--url", help="Server to test; default: start one on a free port.")
    option("--model", default="demo", help="Model of the server that is started.")
    option("--minutes", type=float, default=10.0)
    option("--clients", type=int, default=24, help="Requests in flight at once.")
    option("--abort_rate", type=float, default=0.3, help="Share whose client leaves early.")
    option("--bad_rate", type=float, default=0.1, help="Share that is rubbish.")
    option("--slow_rate", type=float, default=0.05, help="Share read slowly.")
    option("--grammar_rate", type=float, default=0.15, help="Share that asks for a form.")
    option("--max_slope_mb_per_min", type=float, default=1.0, help="Growth in the second half.")
    option("--seed", type=int, default=0, help="Of the clients' choices.")
    options = parser.parse_args()
    server = contextlib.nullcontext(options.url) if options.url else own_server(options.model)
    with server as url:
        return asyncio.run(soak(url, options))


if __name__ == "__main__":
    sys.exit(main())

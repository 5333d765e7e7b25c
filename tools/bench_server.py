"""What HTTP costs, and what it keeps: the serving surface's own figures.

    python tools/bench_server.py             # everything, on the demo model
    python tools/bench_server.py --streams   # only how much throughput streaming costs
    python tools/bench_server.py --patience  # only refusals and probes under load

Throughput: the same requests, all at once, through an engine in this process and through a server
of its own to as many streams; they take turns, so that a machine that slows down slows both.
Patience: refusals while a full queue waits, and /health while large prompts are tokenised.
Exit status 1 when a figure misses its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time

import httpx
import numpy as np
import orjson
from rich.console import Console
from rich.table import Table

from jaxserve.bench import client, offline, process
from jaxserve.bench.workload import Item, Workload
from jaxserve.config import EngineConfig
from jaxserve.engine import start

STREAMS = (32, 200)
MAX_COST = 0.10  # share of the engine's throughput that streaming may take
REFUSAL_S, HEALTH_S = 0.100, 0.050
WAITING = 500  # clients, when refusals are timed
PROMPT, OUTPUT = 16, 96  # tokens of each stream
LARGE = 2_000_000  # characters of a prompt while /health is timed


def workload_of(streams: int, vocab_size: int) -> Workload:
    draw = np.random.default_rng(streams)
    prompts = draw.integers(0, vocab_size, (streams, PROMPT)).tolist()
    items = [Item(f"s{i}", tuple(ids), OUTPUT) for i, ids in enumerate(prompts)]
    return Workload("at once", tuple(items))


def tokens_a_second(records) -> float:
    """From the first request sent to the last token read."""
    failed = [record.error for record in records if not record.good]
    assert not failed, failed[0]
    begin = min(record.sent for record in records)
    return sum(r.output_tokens for r in records) / (max(r.stamps[-1] for r in records) - begin)


@contextlib.contextmanager
def server(*flags: str):
    """URL of a server of our own."""
    url = f"http://127.0.0.1:{(port := process.free_port())}"
    command = process.command("serve", f"--port={port}", *flags)
    with process.server(command, url + "/ready"):
        yield url


def streaming_rows(options):
    """(what, figure, limit, whether it holds) of each number of streams."""
    for streams in options.counts:
        # On one prefix cache the second round would have less to compute than the first.
        config = EngineConfig(model=options.model, num_slots=streams, prefix_caching=False)
        engine = start.build(config, clock=time.perf_counter)
        engine.warm_up()
        workload = workload_of(streams, engine.core.runner.spec.num_tokens)
        alone, through = [], []
        with server(*process.flags_of(config)) as url:
            api = client.Api(url + "/v1", model=engine.model_name)
            for number in range(options.rounds + 1):
                rates = (
                    tokens_a_second(offline.run(offline.fresh_core(engine), workload)[0]),
                    tokens_a_second(asyncio.run(client.run(api, workload))),
                )
                if number:  # the first round warms everything up
                    alone.append(rates[0])
                    through.append(rates[1])
        cost = 1 - statistics.median(through) / statistics.median(alone)
        figure = f"{cost:.1%} ({statistics.median(alone):.0f} tokens/s without)"
        yield f"{streams} streams cost of throughput", figure, f"{MAX_COST:.0%}", cost < MAX_COST


async def refusals(url: str) -> list[float]:
    """Seconds of each refusal while as many clients wait as the server lets wait."""
    body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600) as http:

        async def wait_in_line():
            while True:
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_raw():
                        pass

        line = [asyncio.ensure_future(wait_in_line()) for _ in range(WAITING)]
        while (await http.get("/stats")).json()["engine"]["waiting"] < WAITING - 16:
            await asyncio.sleep(0.1)
        seconds = []
        while len(seconds) < 100:
            begin = time.perf_counter()
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                took = time.perf_counter() - begin
                if answer.status_code != 200:  # a place may have come free
                    assert answer.status_code == 429 and "retry-after" in answer.headers
                    seconds.append(took)
        for client_task in line:
            client_task.cancel()
        await asyncio.gather(*line, return_exceptions=True)
    return seconds


async def health_under_load(url: str) -> list[float]:
    """Seconds of each look at /health while prompts of 2 MB are read, one after the other."""
    words = "the quick brown fox jumps over the lazy dog "
    texts = ("a" * LARGE, words * (LARGE // len(words)), "žluť🙂 " * (LARGE // 12))
    bodies = [orjson.dumps({"prompt": text}) for text in texts]  # not while the clock runs
    seconds = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:

        async def send():
            for body in bodies * 5:
                for path in ("/tokenize", "/v1/completions"):
                    answer = await http.post(path, content=body)
                    assert answer.status_code in (200, 400), answer.status_code

        sending = asyncio.ensure_future(send())
        while not sending.done():
            begin = time.perf_counter()
            assert (await http.get("/health")).status_code == 200
            seconds.append(time.perf_counter() - begin)
            await asyncio.sleep(0.005)
        await sending
    return seconds


def patience_rows(options):
    flags = (f"--model={options.model}", "--num_slots=16", f"--max_queued={WAITING - 16}")
    with server(*flags) as url:
        for what, measure, limit in (
            (f"refusals, {WAITING} clients waiting", refusals, REFUSAL_S),
            ("/health, 2 MB prompts tokenised", health_under_load, HEALTH_S),
        ):
            ms = [1000 * seconds for seconds in asyncio.run(measure(url))]
            figure = f"median {statistics.median(ms):.1f}, largest {max(ms):.1f} of {len(ms)}"
            yield what + ", ms", figure, f"{limit * 1000:.0f}", max(ms) < limit * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option("--model", default="demo")
    option("--counts", type=int, nargs="+", default=STREAMS, help="Streams at once.")
    option("--rounds", type=int, default=3, help="Medians of so many.")
    option("--streams", action="store_true", help="Only the cost of streaming.")
    option("--patience", action="store_true", help="Only refusals and probes.")
    options = parser.parse_args()
    both = not (options.streams or options.patience)
    table, held = Table("", "measured", "limit", "holds"), True
    if options.streams or both:
        for *cells, holds in streaming_rows(options):
            table.add_row(*cells, "yes" if holds else "NO")
            held &= holds
    if options.patience or both:
        for *cells, holds in patience_rows(options):
            table.add_row(*cells, "yes" if holds else "NO")
            held &= holds
    Console(highlight=False).print(table)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

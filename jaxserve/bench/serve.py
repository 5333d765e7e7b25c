"""Measurements over HTTP: of a server somebody runs, or of one started for the purpose."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator

import orjson

from jaxserve import models, tokenizer
from jaxserve.bench import client, process, record
from jaxserve.bench.client import Api
from jaxserve.bench.metrics import Targets, median_of, summarise
from jaxserve.bench.settings import BenchConfig, WorkloadConfig
from jaxserve.bench.workload import Item, Workload, make
from jaxserve.config import EngineConfig, SchedulerConfig

_MAX_LEN_UNKNOWN = 8192  # of somebody else's server: requests that do not fit will fail there
_RATE_STEPS = 5  # halvings of the interval in a search: within 4 % of the rate


@contextlib.contextmanager
def api_of(
    bench: BenchConfig, engine_config: EngineConfig, scheduling: SchedulerConfig
) -> Iterator[Api]:
    """The server to measure, ready; one of our own is ended with the block."""
    api = Api(
        base_url=bench.base_url or "",
        key=bench.api_key,
        extra=orjson.loads(bench.extra_body),
        send_text=bench.send_text,
    )
    with contextlib.ExitStack() as stack:
        if not api.base_url:
            root = f"http://127.0.0.1:{(port := process.free_port())}"
            flags = [*process.flags_of(engine_config, scheduling), f"--port={port}"]
            stack.enter_context(process.server(process.command("serve", *flags), f"{root}/ready"))
            api = dataclasses.replace(api, base_url=f"{root}/v1")
        model = bench.api_model or asyncio.run(client.first_model(api))
        yield dataclasses.replace(api, model=model)


def workload_for(
    config: WorkloadConfig, engine_config: EngineConfig, cache_dir: pathlib.Path | None
) -> Workload:
    """The workload in the words of --model's tokenizer (--tokenizer wins)."""
    override = engine_config.tokenizer and pathlib.Path(engine_config.tokenizer)
    path = override or models.resolve(engine_config.model, cache_dir=cache_dir)
    limit = engine_config.max_model_len or _MAX_LEN_UNKNOWN
    return make(config, tokenizer.load(path, override=override), limit)


def measure(api: Api, workload: Workload, bench: BenchConfig) -> list[dict]:
    """Summaries of --repeats runs, after --warmup requests that do not count."""
    at_once = lambda item: dataclasses.replace(item, arrival=0.0, after=None)
    first = dataclasses.replace(workload, items=tuple(map(at_once, workload.items[: bench.warmup])))
    asyncio.run(client.run(api, unseen(first)))
    return [run_once(api, unseen(workload), bench) for _ in range(bench.repeats)]


_runs = itertools.count()  # of this process: no two of its runs send the same prompt


def unseen(workload: Workload) -> Workload:
    """The workload with another first token, one for each run: what a run leaves in the server's
    prefix cache is of no use to the next, and prompts that shared a prefix still do."""
    pool = sorted({token for item in workload.items for token in item.prompt_ids})
    number = next(_runs)
    token = pool[number % len(pool)]

    def changed(item: Item) -> Item:
        text = item.prompt and f"{number} {item.prompt}"
        return dataclasses.replace(item, prompt_ids=(token, *item.prompt_ids[1:]), prompt=text)

    return dataclasses.replace(workload, items=tuple(map(changed, workload.items)))


def run_once(api: Api, workload: Workload, bench: BenchConfig) -> dict:
    before = record.joules()
    records = asyncio.run(client.run(api, workload, bench.max_concurrency))
    after = record.joules()
    summary = summarise(records, Targets.of(bench))
    if before is not None and after is not None and after > before:
        summary["joules_per_token"] = (after - before) / max(summary.get("output_tokens", 0), 1)
    return summary | {"request_columns": record.request_rows(records)}


# ---- over rates ---------------------------------------------------------------------------------


def sweep(api: Api, workload_at, bench: BenchConfig) -> list[tuple[float, list[dict]]]:
    """(rate, runs) for the rates of --rates. workload_at(rate) makes the workload."""
    if bench.rates == "search":
        return _search(api, workload_at, bench)
    return [(rate, measure(api, workload_at(rate), bench)) for rate in _rates(bench.rates)]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or min(rates) <= 0:
        raise ValueError(f"--rates={text}: give rates like 0.5,1,2, or search")
    return rates


def _search(api: Api, workload_at, bench: BenchConfig) -> list[tuple[float, list[dict]]]:
    """Doubles the rate until the bounds break, then halves the interval: the last rate that keeps
    them is the answer, and all that was tried is returned by rate."""
    tried, low, high = [], 0.0, None
    rate = 0.25
    for _ in range(_RATE_STEPS * 2):
        runs = measure(api, workload_at(rate), bench)
        tried.append((rate, runs))
        if keeps_bounds(median_of(runs), bench):
            low = rate
        else:
            high = rate
        if high is not None and high - low < 0.04 * high:
            break
        rate = rate * 2 if high is None else (low + high) / 2
    return sorted(tried, key=lambda pair: pair[0])


def keeps_bounds(summary: dict, bench: BenchConfig) -> bool:
    return (
        summary["failed"] == 0
        and summary["ttft_ms"]["p99"] <= bench.ttft_p99_ms
        and summary["itl_ms"]["p99"] <= bench.itl_p99_ms
    )

"""Measurements over HTTP: of a server somebody runs, or of one started for the purpose."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import pathlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from jaxserve import models, tokenizer
from jaxserve.bench import client, occupancy, process
from jaxserve.bench.client import Api
from jaxserve.bench.energy import Meter
from jaxserve.bench.metrics import Targets, median_of, request_rows, summarise
from jaxserve.bench.settings import BenchConfig, WorkloadConfig
from jaxserve.bench.workload import Item, Workload, arrivals, at_times, make
from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.progress import ending
from jaxserve.tokenizer import Tokenizer

_MAX_LEN_UNKNOWN = 8192  # of somebody else's server: requests that do not fit will fail there
_FEWEST = 16  # requests of a sustained run, however slowly they come
# A search: the most rates it tries, the ratio at which it is content, how far down it looks, and
# where it begins, as a share of what the server does when all requests come at once.
_MAX_RATES, _CLOSE, _LEAST, _UNDER = 12, 1.1, 1 / 16, 0.8


Watch = Callable[[str, int, int], None]  # what is measured, requests ended, of how many


def unwatched(*_) -> None:
    """Nobody follows."""


@contextlib.contextmanager
def api_of(
    bench: BenchConfig,
    engine_config: EngineConfig,
    scheduling: SchedulerConfig,
    count_tokens: Callable[[str], int],
    watch: Watch = unwatched,
) -> Iterator[Api]:
    """The server to measure, ready; one of our own is ended with the block."""
    api = Api(
        base_url=bench.base_url or "",
        key=bench.api_key,
        extra=orjson.loads(bench.extra_body),
        send_text=bench.send_text,
        chat=bench.chat,
        timeout_s=bench.timeout_s,
        count_tokens=count_tokens,
    )
    with contextlib.ExitStack() as stack:
        if not api.base_url:
            root = f"http://127.0.0.1:{(port := process.free_port())}"
            flags = [*process.flags_of(engine_config, scheduling), f"--port={port}"]
            watch("starting a server", 0, 1)
            stack.enter_context(process.server(process.command("serve", *flags), f"{root}/ready"))
            api = dataclasses.replace(api, base_url=f"{root}/v1")
        model = bench.api_model or asyncio.run(client.first_model(api))
        yield dataclasses.replace(api, model=model)


def facts_of(api: Api) -> dict:
    """What the server says of itself: of a jaxserve the model with its weights' hash, the settings
    as worked out and the hardware; of others the version, if they have a /version to ask."""
    try:
        told = asyncio.run(client.get(api.root, "/version"))
    except (OSError, ValueError):
        told = {}
    facts = {"server": {"base_url": api.base_url, "version": str(told.get("version", "unknown"))}}
    facts["model"] = {"name": api.model}
    if isinstance(weights := told.get("weights"), dict):
        facts["model"] |= {f"weights_{name}": value for name, value in weights.items()}
    for name in ("config", "scheduling", "hardware"):
        if isinstance(told.get(name), dict):
            facts[name] = told[name]
    return facts


def tokenizer_of(engine_config: EngineConfig, cache_dir: pathlib.Path | None) -> Tokenizer:
    """That of --model; --tokenizer wins."""
    override = engine_config.tokenizer and pathlib.Path(engine_config.tokenizer)
    path = override or models.resolve(engine_config.model, cache_dir=cache_dir)
    return tokenizer.load(path, override=override)


def workload_for(
    config: WorkloadConfig, bench: BenchConfig, text: Tokenizer, max_model_len: int | None
) -> Workload:
    """The workload in the words of a tokenizer, as texts too where texts are to be sent."""
    wanted = make(config, text, max_model_len or _MAX_LEN_UNKNOWN)
    if not (bench.send_text or bench.chat):
        return wanted
    texts = (item.prompt or text.decode(item.prompt_ids) for item in wanted.items)
    items = (dataclasses.replace(item, prompt=prompt) for item, prompt in zip(wanted.items, texts))
    return dataclasses.replace(wanted, items=tuple(items))


def measure(
    api: Api,
    workload: Workload,
    bench: BenchConfig,
    meter: Meter,
    *,
    renew: Callable[[Workload], Workload] | None = None,
    watch: Watch = unwatched,
    title: str = "",
) -> list[dict]:
    """Summaries of --repeats runs, after --warmup requests that do not count. renew(workload): what
    a run sends; default: unseen. ValueError when the server serves none of the warm-up."""
    renew = renew or unseen
    at_once = lambda item: dataclasses.replace(item, arrival=0.0, after=None)
    first = dataclasses.replace(workload, items=tuple(map(at_once, workload.items[: bench.warmup])))
    on_end = ending(watch, f"{title}warm-up", len(first.items))
    warmed = asyncio.run(client.run(api, unseen(first), bench.max_concurrency, on_end))
    if warmed and not any(record.good for record in warmed):
        raise ValueError(
            f"{api.base_url}: none of {len(warmed)} warm-up requests was served: {warmed[0].error}"
        )
    return [
        run_once(
            api, renew(workload), bench, meter, watch, f"{title}run {n + 1} of {bench.repeats}"
        )
        for n in range(bench.repeats)
    ]


# Of this process, from a number that no other begins with: no two runs send the same prompt, also
# where a server outlives the bench.
_runs = itertools.count(secrets.randbelow(2**32))


def unseen(workload: Workload) -> Workload:
    """The workload with two other tokens at its prompts' beginning, others for each run: what a run
    leaves in the server's prefix cache is of no use to the next, and prompts that shared a prefix
    still do."""
    pool = sorted({token for item in workload.items for token in item.prompt_ids})
    number = next(_runs)
    begin = (pool[number % len(pool)], pool[number // len(pool) % len(pool)])

    def changed(item: Item) -> Item:
        ids = (*begin, *item.prompt_ids[2:])[: len(item.prompt_ids)]
        text = item.prompt and f"{number} {item.prompt}"
        return dataclasses.replace(item, prompt_ids=ids, prompt=text)

    return dataclasses.replace(workload, items=tuple(map(changed, workload.items)))


def sustained(workload: Workload, rate: float, seconds: float, config: WorkloadConfig) -> Workload:
    """Requests at this rate for so many seconds, so that what an engine cannot keep up with piles
    up: the workload's, over and over where they do not reach, each lap unseen."""
    count = max(round(rate * seconds), _FEWEST)
    items = []
    for lap in range(-(-count // len(workload.items))):
        name = lambda id, lap=lap: id and f"{id}.{lap}"
        items += [
            dataclasses.replace(item, id=name(item.id), after=name(item.after))
            for item in unseen(workload).items
        ]
    times = arrivals(count, dataclasses.replace(config, request_rate=rate))
    return dataclasses.replace(workload, items=tuple(at_times(items[:count], times)))


def run_once(
    api: Api,
    workload: Workload,
    bench: BenchConfig,
    meter: Meter,
    watch: Watch = unwatched,
    title: str = "",
) -> dict:
    on_end = ending(watch, title, len(workload.items))
    slots, joules = asyncio.run(occupancy.read(api)), meter.read()
    records = asyncio.run(client.run(api, workload, bench.max_concurrency, on_end))
    summary = summarise(records, Targets.of(bench), joules=meter.since(joules))
    summary |= occupancy.between(slots, asyncio.run(occupancy.read(api)))
    return summary | {"request_columns": request_rows(records)}


# ---- over rates ---------------------------------------------------------------------------------


def sweep(
    api: Api,
    workload: Workload,
    config: WorkloadConfig,
    bench: BenchConfig,
    meter: Meter,
    watch: Watch = unwatched,
) -> list[tuple[float, list[dict]]]:
    """(rate, runs) for the rates of --rates."""

    def run_at(rate: float, renew=None, sent: Workload = workload) -> list[dict]:
        title = f"{rate:.3g} requests/s, "
        return measure(api, sent, bench, meter, renew=renew, watch=watch, title=title)

    if not (rates := rates_of(bench)):
        at_once = run_once(api, unseen(workload), bench, meter, watch, "all at once")
        if "requests_per_s" not in at_once:
            raise ValueError(f"{api.base_url}: no request was served: {at_once['first_error']}")
        sustained_at = lambda rate: run_at(
            rate, lambda w: sustained(w, rate, bench.search_s, config)
        )
        keeps = lambda runs: keeps_bounds(median_of(runs), bench)
        return search(sustained_at, keeps, start=_UNDER * at_once["requests_per_s"])

    def arriving(rate: float) -> Workload:
        times = arrivals(len(workload.items), dataclasses.replace(config, request_rate=rate))
        return dataclasses.replace(workload, items=tuple(at_times(workload.items, times)))

    return [(rate, run_at(rate, sent=arriving(rate))) for rate in rates]


def rates_of(bench: BenchConfig) -> list[float]:
    """Of --rates, none of "search"; ValueError for what are no rates."""
    if bench.rates == "search":
        return []
    try:
        rates = [float(part) for part in bench.rates.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"--rates={bench.rates}: give rates like 0.5,1,2, or search")
    return rates


def search(
    run_at: Callable[[float], Any],
    keeps: Callable[[Any], bool],
    *,
    start: float,
    factor: float = 1.25,
) -> list[tuple[float, Any]]:
    """(rate, what run_at(rate) gave) of all that was tried, by rate. The highest that keeps is
    close to one that does not, unless all do or none does.

    From `start` it goes up while rates keep, or down while they do not, by `factor`, then by more,
    to 2; then it halves the interval of logarithms.
    """
    tried, low, high, rate = {}, None, None, start
    while len(tried) < _MAX_RATES and rate >= _LEAST * start:
        tried[rate] = run_at(rate)
        if keeps(tried[rate]):
            low = rate
        else:
            high = rate
        if low is not None and high is not None:
            if high <= _CLOSE * low:
                break
            rate = math.sqrt(low * high)
        else:
            rate = rate * factor if high is None else rate / factor
            factor = min(factor**2, 2.0)
    return sorted(tried.items())


def keeps_bounds(summary: dict, bench: BenchConfig) -> bool:
    """Whether nothing failed and the p99s are within --ttft_p99_ms and --itl_p99_ms."""
    p99 = lambda name: (summary.get(name) or {"p99": 0.0})["p99"]  # one token each: no gaps
    return (
        summary["failed"] == 0
        and p99("ttft_ms") <= bench.ttft_p99_ms
        and p99("itl_ms") <= bench.itl_p99_ms
    )


def highest(tried: Sequence[tuple[float, list[dict]]], bench: BenchConfig) -> float:
    """The highest of these rates, in order, that keeps the bounds as all below it do; or 0."""
    kept = itertools.takewhile(lambda pair: keeps_bounds(median_of(pair[1]), bench), tried)
    return max((rate for rate, _ in kept), default=0.0)

"""`jaxserve bench offline|serve|startup|sweep`: measures, prints a table, writes JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from jaxserve.bench import process, record
from jaxserve.bench.energy import Meter
from jaxserve.bench.settings import BenchConfig, WorkloadConfig
from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.progress import Progress


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything the command line said."""

    engine: EngineConfig
    scheduling: SchedulerConfig
    workload: WorkloadConfig
    bench: BenchConfig
    console: Console
    cache_dir: pathlib.Path | None = None
    progress: Progress | None = None

    def settings(self) -> dict:
        return {
            "workload": dataclasses.asdict(self.workload),
            "bench": dataclasses.asdict(dataclasses.replace(self.bench, api_key=None)),
        }

    def watch(self, item: str, done: int, total: int) -> None:
        """Shows how far a measurement is."""
        if self.progress is not None:
            self.progress.part("measure")(item, done, total)

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)


def run(job: Job, what: str) -> int:
    """Measures `what` and leaves its JSON file. ValueError for what could not be measured as asked.

    The exit status is 1 when a request failed: figures of the rest are not the machine's.
    """
    if what not in _KINDS:
        raise ValueError(f"bench {what}: choose one of {', '.join(_KINDS)}")
    check(job, what)
    documents = _KINDS[what](job)
    show(documents, job.console)
    for line in remarks(documents):
        job.say(line)
    path = job.bench.output or f"jaxserve-bench-{what}.json"
    record.write(path, documents)
    job.say(f"written to {path}; `jaxserve report {path}` draws it")
    return int(any(document["median"].get("failed") for document in documents))


def check(job: Job, what: str) -> None:
    """ValueError for settings that this kind of measurement would not heed, or cannot; before
    anything is loaded."""
    from jaxserve.bench import serve, workload

    for config in (job.workload, job.bench):
        for field in dataclasses.fields(config):
            only = field.metadata.get("only", (what,))
            if what not in only and getattr(config, field.name) != field.default:
                raise ValueError(f"--{field.name} is for bench {' and '.join(only)}, not {what}")
    unheeded = dataclasses.replace(job.engine, **_SHAPES_PROMPTS)
    if job.bench.base_url and (flags := process.flags_of(unheeded, job.scheduling)):
        raise ValueError(f"{flags[0]} is nothing to the server at --base_url; leave it out")
    if what == "sweep":
        serve.rates_of(job.bench)
    elif job.workload.burstiness != WorkloadConfig.burstiness and not job.workload.request_rate:
        raise ValueError(f"--burstiness={job.workload.burstiness} needs a --request_rate")
    if what != "startup":
        workload.check(job.workload)


# Settings of an engine, at their defaults, that say what is sent even to somebody else's.
_SHAPES_PROMPTS = {
    name: getattr(EngineConfig, name) for name in ("model", "tokenizer", "max_model_len")
}


def _offline(job: Job) -> list[dict]:
    from jaxserve.bench import offline, workload
    from jaxserve.engine.start import build

    engine = build(
        job.engine,
        job.scheduling,
        clock=time.perf_counter,
        progress=job.progress,
        cache_dir=job.cache_dir,
    )
    engine.warm_up()
    wanted = workload.make(job.workload, engine.tokenizer, engine.config.max_model_len)
    job.say(str(wanted))
    policies = list(dict.fromkeys([engine.config.batching, *_COMPARED[job.bench.compare]]))
    meter = Meter()
    runs = offline.measure(engine, job.scheduling, wanted, job.bench, policies, meter, job.watch)
    facts = record.engine_facts(engine) | job.settings() | {"energy": meter.facts()}
    facts["scheduling"] = dataclasses.asdict(job.scheduling)
    label = job.bench.label or engine.model_name
    return [
        record.document("offline", f"{label}, {policy}", runs[policy], batching=policy, **facts)
        for policy in policies
    ]


_COMPARED = {"none": (), "static": ("static",)}


def _serve(job: Job) -> list[dict]:
    from jaxserve.bench import serve

    with _asked(job) as (api, wanted, meter):
        runs = serve.measure(api, wanted, job.bench, meter, watch=job.watch)
        facts = _server_facts(job, api, meter)
    return [record.document("serve", job.bench.label or api.model, runs, **facts)]


def _sweep(job: Job) -> list[dict]:
    from jaxserve.bench import serve

    with _asked(job) as (api, wanted, meter):
        found = serve.sweep(api, wanted, job.workload, job.bench, meter, job.watch)
        facts = _server_facts(job, api, meter)
    label = job.bench.label or api.model
    documents = [record.document("sweep", label, runs, rate=rate, **facts) for rate, runs in found]
    if job.bench.rates == "search":
        answer = {"highest_rate": serve.highest(found, job.bench)}
        documents.append(record.document("search", label, [answer], **facts))
    return documents


@contextlib.contextmanager
def _asked(job: Job) -> Iterator[tuple]:
    """(the server to measure, the workload, a meter)."""
    from jaxserve.bench import serve

    text = serve.tokenizer_of(job.engine, job.cache_dir)
    wanted = serve.workload_for(job.workload, job.bench, text, job.engine.max_model_len)
    job.say(str(wanted))
    count = lambda answer: len(text.encode(answer, add_special_tokens=False))
    with serve.api_of(job.bench, job.engine, job.scheduling, count, job.watch) as api:
        yield api, wanted, Meter()


def _server_facts(job: Job, api, meter: Meter) -> dict:
    from jaxserve.bench import serve

    return serve.facts_of(api) | job.settings() | {"energy": meter.facts()}


def _startup(job: Job) -> list[dict]:
    from jaxserve.bench import startup

    runs = startup.run(job.engine, job.scheduling, job.bench.repeats, job.watch)
    facts = {
        name: dataclasses.asdict(settings)
        for name, settings in (("config", job.engine), ("scheduling", job.scheduling))
    }
    label = job.bench.label or " ".join(process.flags_of(job.engine)) or job.engine.model
    return [record.document("startup", label, runs, **facts)]


_KINDS = {"offline": _offline, "serve": _serve, "startup": _startup, "sweep": _sweep}

COLUMNS = {
    "rate": "rate/s",
    "highest_rate": "highest rate/s",
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "tokens/s",
    "goodput_per_s": "goodput/s",
    "ttft_ms": "TTFT ms p50 / p99",
    "tpot_ms": "TPOT ms p50 / p99",
    "itl_ms": "ITL ms p50 / p99",
    "e2e_ms": "E2E ms p50 / p99",
    "occupancy": "slots busy",
    "occupancy_queued": "slots busy while queued",
    "cached_share": "prompt cached",
    "joules_per_token": "joules/token",
    "failed": "failed",
    "slope": "slope",
    "worst": "off the line at most",
    "cold_s": "cold s",
    "warm_s": "warm s",
}


def figures_of(document: dict) -> dict:
    return document["median"] | {"rate": document.get("rate")}


def show(documents: list[dict], console: Console) -> None:
    """One column a document, the figures that any of them has; as many beside each other as fit."""
    fit = max((console.width - _TITLE_WIDTH) // _COLUMN_WIDTH, 1)
    for first in range(0, len(documents), fit):
        part = documents[first : first + fit]
        figures = [figures_of(document) for document in part]
        table = Table("", *(document["label"] for document in part))
        for name, title in COLUMNS.items():
            if any(f.get(name) is not None for f in figures):
                table.add_row(title, *(cell(f.get(name)) for f in figures))
        console.print(table)


_TITLE_WIDTH, _COLUMN_WIDTH = 26, 18


def remarks(documents: Sequence[dict]) -> Iterator[str]:
    """What a reader of the figures should know, a line each."""
    for one, other in itertools.pairwise(documents):
        if (one.get("batching"), other.get("batching")) == ("continuous", "static"):
            yield _ratio(one["median"], other["median"])
    for document in documents:
        seen, name = document["median"], document["label"]
        if seen.get("failed"):
            error = next(r["first_error"] for r in document["runs"] if r["failed"])
            yield f"{name}: {seen['failed']} requests failed, the first by: {error}"
        if seen.get("short"):
            yield f"{name}: {seen['short']} answers ended before the length asked for"
        if seen.get("estimated"):
            yield (
                f"{name}: the server did not count the tokens of {seen['estimated']} answers; they "
                "are counted from the text, with --model's tokenizer"
            )
    energy = next((d["energy"] for d in documents if "energy" in d), None)
    if energy is not None and not energy["source"]:
        yield f"no energy measured: {energy['missing']}"


def _ratio(continuous: dict, static: dict) -> str:
    if not any("occupancy_queued" in seen for seen in (continuous, static)):
        return "no request waited for a slot: continuous and static batching had the same to do"
    ratio = continuous["output_tokens_per_s"] / static["output_tokens_per_s"]
    return f"continuous batching serves {ratio:.2f} times the tokens/s of static"


def cell(value) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"{cell(value['p50'])} / {cell(value['p99'])}"
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"

"""`jaxserve bench offline|serve|startup|sweep`: measures, prints a table, writes JSON."""

from __future__ import annotations

import dataclasses
import pathlib
import time

from rich.console import Console
from rich.table import Table

from jaxserve.bench import process, record
from jaxserve.bench.settings import BenchConfig, WorkloadConfig
from jaxserve.config import EngineConfig, SchedulerConfig


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything the command line said."""

    engine: EngineConfig
    scheduling: SchedulerConfig
    workload: WorkloadConfig
    bench: BenchConfig
    console: Console
    cache_dir: pathlib.Path | None = None
    progress: object = None

    def settings(self) -> dict:
        return {
            "workload": dataclasses.asdict(self.workload),
            "bench": dataclasses.asdict(dataclasses.replace(self.bench, api_key=None)),
            "scheduling": dataclasses.asdict(self.scheduling),
        }


def run(job: Job, what: str) -> int:
    """Measures `what` and leaves its JSON file. ValueError for an unknown name."""
    if what not in _KINDS:
        raise ValueError(f"bench {what}: choose one of {', '.join(_KINDS)}")
    documents = _KINDS[what](job)
    show(documents, job.console)
    path = job.bench.output or f"jaxserve-bench-{what}.json"
    record.write(path, documents)
    job.console.print(f"written to {path}; `jaxserve report {path}` draws it", markup=False)
    return 0


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
    job.console.print(str(wanted), markup=False)
    policies = [engine.config.batching]
    if job.bench.compare == "static":
        policies.append("static")
    runs = offline.measure(engine, job.scheduling, wanted, job.bench, policies)
    facts = record.engine_facts(engine) | job.settings()
    label = job.bench.label or engine.model_name
    return [
        record.document("offline", f"{label}, {policy}", runs[policy], **facts)
        for policy in policies
    ]


def _serve(job: Job) -> list[dict]:
    from jaxserve.bench import serve

    wanted = serve.workload_for(job.workload, job.engine, job.cache_dir)
    job.console.print(str(wanted), markup=False)
    with serve.api_of(job.bench, job.engine, job.scheduling) as api:
        runs = serve.measure(api, wanted, job.bench)
    label = job.bench.label or api.model
    return [record.document("serve", label, runs, **_server_facts(job, api))]


def _sweep(job: Job) -> list[dict]:
    from jaxserve.bench import serve

    wanted = serve.workload_for(job.workload, job.engine, job.cache_dir)
    job.console.print(str(wanted), markup=False)
    with serve.api_of(job.bench, job.engine, job.scheduling) as api:
        found = serve.sweep(api, wanted, job.workload, job.bench)
    label, facts = job.bench.label or api.model, _server_facts(job, api)
    documents = [record.document("sweep", label, runs, rate=rate, **facts) for rate, runs in found]
    if job.bench.rates == "search":
        answer = {"highest_rate": serve.highest(found, job.bench)}
        documents.append(record.document("search", label, [answer], **facts))
    return documents


def _server_facts(job: Job, api) -> dict:
    config = dataclasses.asdict(job.engine)
    return {"model": {"name": api.model}, "config": config, **job.settings()}


def _startup(job: Job) -> list[dict]:
    from jaxserve.bench import startup

    runs = startup.run(job.engine, job.scheduling, job.bench.repeats)
    facts = {"config": dataclasses.asdict(job.engine), **job.settings()}
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
    "occupancy_queued": "slots busy while queued",
    "cached_share": "prompt cached",
    "failed": "failed",
    "slope": "slope",
    "worst": "off the line at most",
    "cold_s": "cold s",
    "warm_s": "warm s",
}


def show(documents: list[dict], console: Console) -> None:
    """One column a document, the figures that any of them has."""
    figures = [document["median"] | {"rate": document.get("rate")} for document in documents]
    table = Table("", *(document["label"] for document in documents))
    for name, title in COLUMNS.items():
        if any(f.get(name) is not None for f in figures):
            table.add_row(title, *(cell(f.get(name)) for f in figures))
    console.print(table)


def cell(value) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"{value['p50']:,.0f} / {value['p99']:,.0f}"
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"

"""What the command line does, a verb a function. main.py turns flags into their arguments.

Imports that take long (jax, the server) are in the functions: help and flag errors come at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import pathlib
import sys
import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from jaxserve.bench.settings import BenchConfig, ReportConfig, WorkloadConfig
from jaxserve.config import EngineConfig, SchedulerConfig, ServerConfig, check_path, setting
from jaxserve.progress import Progress
from jaxserve.types import RequestRefused

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How `generate` and `chat` sample."""

    max_tokens: int = setting(256, "Tokens to generate at most.")
    temperature: float = setting(0.0, "0 is greedy.")
    top_k: int = setting(0, "Sample among the k likeliest tokens; 0 is off.")
    top_p: float = setting(1.0, "Sample among the likeliest tokens of this probability; 1 is off.")
    seed: int | None = setting(None, "Makes sampling repeatable.")
    system: str | None = setting(None, "System message of a chat.")

    def validate(self) -> None:
        self.params()

    def params(self):
        from jaxserve.types import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
        )


@dataclasses.dataclass(frozen=True)
class Verb:
    """One thing the command line does.

    run(configs..., arguments, cache_dir) returns the exit status.
    """

    run: Callable[..., int]
    help: str
    configs: tuple[type, ...]
    arguments: str = ""


def serve(
    engine_config: EngineConfig,
    scheduling: SchedulerConfig,
    server_config: ServerConfig,
    _,
    cache_dir,
) -> int:
    from jaxserve.engine.async_engine import AsyncEngine
    from jaxserve.obs.metrics import Metrics
    from jaxserve.obs.tracing import Tracing
    from jaxserve.server import app
    from jaxserve.server.auth import KeyRing

    start = time.monotonic()
    keys = KeyRing.load(server_config.api_keys_file)
    listener = app.bind(server_config.host, server_config.port)
    shadow_cost = _shadow_cost(server_config)
    endpoint = server_config.otlp_traces_endpoint
    tracing = None if endpoint is None else Tracing.connect(endpoint)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)  # which devices are not here is no news
    with Progress(errors) as progress:
        parts = _build(engine_config, scheduling, progress, cache_dir)
        shadow = _shadow(server_config, shadow_cost, parts.core)
        engine = AsyncEngine.from_parts(parts)
        metrics = Metrics(engine.stats, engine.model_name, shadow)
        engine.observe(metrics)
        if tracing is not None:
            engine.observe(tracing)

        def announce(url: str) -> None:
            """Called once the port is open; says how to use it once the engine is warm."""
            threading.Thread(
                target=_greet, args=(engine, url, progress, start), daemon=True
            ).start()

        app.serve(
            engine,
            server_config,
            listener,
            keys=keys,
            metrics=metrics,
            tracing=tracing,
            on_listening=announce,
        )
    if shadow is not None:
        shadow.close()
    return 0


def _shadow_cost(config: ServerConfig):
    """The CostModel that the settings name; None without one."""
    from jaxserve.sim.cost_model import CostModel

    path = config.shadow_cost_model
    return None if path is None else CostModel.load(pathlib.Path(path))


def _shadow(config: ServerConfig, cost, core):
    """The Shadow that the settings ask for, at work; None without one."""
    from jaxserve.sim.shadow import Shadow, ShadowedScheduler

    if config.shadow_policy is None:
        return None
    scheduler = core.scheduler
    shadow = Shadow(scheduler.limits, scheduler.config, config.shadow_policy, cost)
    core.scheduler = ShadowedScheduler(scheduler, shadow)
    core.observers.append(shadow)
    shadow.start()
    return shadow


def _greet(engine, url: str, progress: Progress, start: float) -> None:
    from jaxserve.types import EngineFailed

    with contextlib.suppress(EngineFailed):  # which its own thread has told
        engine.wait_until_ready()
    if engine.health().state != "ready":
        return
    # What a start leaves behind stays for good. Looking through it for garbage would stop every
    # stream for 90 ms each time (the demo model on a CPU; measured).
    gc.collect()
    gc.freeze()
    progress.__exit__()
    with contextlib.suppress(OSError):  # it serves, whether anybody can be told or not
        _announce(engine, url, time.monotonic() - start)


def _announce(engine, url: str, seconds: float) -> None:
    body = f'{{"model": "{engine.model_name}", "messages": [{{"role": "user", "content": "Hi!"}}]}}'
    console.print(engine.description, soft_wrap=True, markup=False)
    console.print(f"memory: {engine.memory_table}", markup=False)
    console.print(f"ready after {seconds:.1f} s at {url}", markup=False)
    console.print(
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        soft_wrap=True,
        markup=False,
    )


def generate(
    engine_config: EngineConfig,
    scheduling: SchedulerConfig,
    sampling: SamplingConfig,
    prompts,
    cache_dir,
) -> int:
    prompts = prompts or [sys.stdin.read()]
    llm = _load(engine_config, scheduling, cache_dir)
    for output in llm.generate(prompts, sampling.params()):
        console.print(f"{output.prompt}{output.outputs[0].text}", markup=False, soft_wrap=True)
    return 0


def chat(engine_config, scheduling, sampling: SamplingConfig, _, cache_dir) -> int:
    """A conversation in the terminal; replies stream in, with their speed."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  for input(): a terminal alone cuts lines at 4096 bytes
    llm = _load(engine_config, scheduling, cache_dir)
    errors.print(
        f"{llm.engine.description}\n"
        "[dim]Ctrl-C ends an answer; an empty line or Ctrl-D ends the chat.[/dim]"
    )
    messages = [{"role": "system", "content": sampling.system}] if sampling.system else []
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            line = ""
        if not line:
            return 0
        messages.append({"role": "user", "content": line})
        try:
            reply = _reply(llm, messages, sampling.params())
        except RequestRefused as error:  # most often: too long by now
            errors.print(str(error), style="red", markup=False, soft_wrap=True)
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": reply})


def _reply(llm, messages, params) -> str:
    start, first, count, text = time.monotonic(), None, 0, ""
    with contextlib.suppress(KeyboardInterrupt):  # ends the answer, not the chat
        for delta in llm.stream(llm.tokenizer.encode_chat(messages), params):
            first = first or time.monotonic()
            count += len(delta.token_ids)
            text += delta.text
            console.print(delta.text, end="", markup=False, soft_wrap=True)
    seconds = max(time.monotonic() - (first or start), 1e-9)
    speed = f"{(count - 1) / seconds:.1f} tokens/s" if count > 1 else f"{count} token"
    console.print(f"\n[dim]first token {(first or start) - start:.2f} s, {speed}[/dim]")
    return text


def info(engine_config, scheduling, _, cache_dir) -> int:
    """Devices, versions, the settings as worked out, and the programs they need."""
    import jax

    llm = _load(engine_config, scheduling, cache_dir)
    table = Table("", Column(overflow="fold"), show_header=False, box=None)
    made_of = llm.engine.manifest
    versions = ", ".join(f"{name} {version}" for name, version in made_of["versions"].items())
    devices = ", ".join(f"{d.id}: {d.device_kind}" for d in jax.devices())
    table.add_row("versions", versions)
    table.add_row("devices", f"{jax.default_backend()}: {devices}")
    table.add_row("weights", made_of["weights"]["sha256_of_samples"])
    table.add_row("tokenizer", made_of["tokenizer"]["sha256_of_table"])
    table.add_row("runs", llm.engine.description)
    table.add_row("memory", str(llm.engine.memory_table))
    for field in dataclasses.fields(llm.config):
        table.add_row(f"--{field.name}", escape(str(getattr(llm.config, field.name))))
    for name, seconds in sorted(llm.engine.core.runner.compile_seconds.items()):
        table.add_row(f"program {name}", f"{seconds:.1f} s")
    console.print(table)
    return 0


def bench(workload, bench_config, engine_config, scheduling, arguments, cache_dir) -> int:
    from jaxserve.bench.run import Job, run

    if len(arguments) != 1:
        raise ValueError("bench: say what to measure: offline, serve, startup or sweep")
    with Progress(errors) as progress:
        job = Job(engine_config, scheduling, workload, bench_config, console, cache_dir, progress)
        return run(job, arguments[0])


def report(report_config: ReportConfig, files, _) -> int:
    from jaxserve.bench.report import write

    console.print(
        f"written to {write(files, pathlib.Path(report_config.report_dir))}", markup=False
    )
    return 0


def batch(engine_config, scheduling, files, cache_dir) -> int:
    """Runs a file of requests in OpenAI's batch format; answered lines are not run again."""
    from jaxserve.server import batch as batches

    if len(files) != 2:
        raise ValueError("batch: give two files, as in `jaxserve batch IN.jsonl OUT.jsonl`")
    source, target = files
    lines = list(batches.read_lines(pathlib.Path(source)))
    check_path(target, "write")
    batches.check_target(pathlib.Path(target))
    with Progress(errors) as progress:
        engine = _start(engine_config, scheduling, progress, cache_dir)
        engine.wait_until_ready()
        failed = batches.run(lines, pathlib.Path(target), engine, progress=progress.part("answer"))
        engine.shutdown()
    errors.print(f"{failed} lines failed" if failed else "every line has its answer")
    return 1 if failed else 0


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """What to read out of a decision log."""

    request: str | None = setting(None, "explain: id of the request whose life to tell.")
    cost_model: str = setting("cost_model.json", "calibrate: the file to write.")

    def validate(self) -> None:
        pass


def _log_file(files: list[str]) -> pathlib.Path:
    if len(files) != 1:
        raise ValueError("give one decision log, as written by --decision_log=FILE")
    return pathlib.Path(files[0])


def explain(config: LogConfig, files, _) -> int:
    from jaxserve.obs import explain as telling

    if config.request is None:
        raise ValueError("explain: say whose life to tell, as in --request=ID")
    return telling.run(_log_file(files), request=config.request, out=_say)


def replay(config: LogConfig, files, _) -> int:
    from jaxserve.obs.decision_log import run_replay

    return run_replay(_log_file(files), out=_say)


def calibrate(config: LogConfig, files, _) -> int:
    from jaxserve.obs.decision_log import run_calibrate

    check_path(config.cost_model, "write")
    return run_calibrate(_log_file(files), cost_model=pathlib.Path(config.cost_model), out=_say)


@dataclasses.dataclass(frozen=True)
class SimulationConfig:
    """What to try on paper."""

    workload: str = setting("skewed", "skewed, poisson, two_tenants, or a trace's name.")
    policies: str | None = setting(
        None, "Policies to compare, comma separated; default: --policy alone."
    )
    cost_model: str | None = setting(
        None, "File by `calibrate`; default: an example's costs.", path="read"
    )
    traces: str = setting("traces", "Folder of published traces.")
    rate: float = setting(1.0, "Requests a second, for generated workloads.")
    count: int = setting(1000, "Requests, for generated workloads.")
    speed: float = setting(1.0, "Factor on the workload's arrival times.")
    num_slots: int = setting(256, "Sequences that run at once.")
    num_pages: int = setting(40_000, "KV pages.")
    token_budget: int = setting(2048, "Tokens a step computes at most.")
    host_pages: int = setting(0, "Pages of host memory for the KV of preempted sequences.")
    plot: str | None = setting(None, "Picture of policy against policy.", path="write")

    def validate(self) -> None:
        EngineConfig(
            num_slots=self.num_slots, num_pages=self.num_pages, token_budget=self.token_budget
        ).validate()
        for name, low in (("rate", 1e-6), ("speed", 1e-6), ("count", 1), ("host_pages", 0)):
            if not getattr(self, name) >= low:  # or nan
                raise ValueError(f"--{name}={getattr(self, name)}: must be at least {low}")


def simulate(config: SimulationConfig, scheduling: SchedulerConfig, _, __) -> int:
    from jaxserve.sim import simulator

    settings = dataclasses.asdict(config)
    policies = (settings.pop("policies") or scheduling.policy).split(",")
    with Progress(errors) as progress:
        simulator.run(
            workload_name=settings.pop("workload"),
            policies=policies,
            config=scheduling,
            out=_say,
            progress=progress.part("simulate"),
            **settings,
        )
    return 0


def _say(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def _build(engine_config, scheduling, progress, cache_dir):
    """Everything a server runs with, loaded and sized."""
    from jaxserve.engine.start import build

    return build(
        engine_config,
        scheduling,
        clock=time.monotonic,
        progress=progress,
        cache_dir=cache_dir,
    )


def _start(engine_config, scheduling, progress, cache_dir):
    """An AsyncEngine that still warms up."""
    from jaxserve.engine.async_engine import AsyncEngine

    return AsyncEngine.from_parts(_build(engine_config, scheduling, progress, cache_dir))


def _load(engine_config: EngineConfig, scheduling: SchedulerConfig, cache_dir):
    from jaxserve.llm import LLM

    with Progress(errors) as progress:
        return LLM.from_config(engine_config, scheduling, progress=progress, cache_dir=cache_dir)


ENGINE = (EngineConfig, SchedulerConfig)
VERBS = {
    "serve": Verb(serve, "Serve the model over HTTP.", (*ENGINE, ServerConfig)),
    "generate": Verb(
        generate,
        "Continue prompts (arguments or standard input).",
        (*ENGINE, SamplingConfig),
        "[PROMPT ...]",
    ),
    "chat": Verb(chat, "Chat in the terminal.", (*ENGINE, SamplingConfig)),
    "bench": Verb(
        bench,
        "Measure speed: offline, over HTTP, starts, or over rates.",
        (WorkloadConfig, BenchConfig, *ENGINE),
        "offline|serve|startup|sweep",
    ),
    "batch": Verb(
        batch, "Answer a file of requests in OpenAI's batch format.", ENGINE, "IN.jsonl OUT.jsonl"
    ),
    "explain": Verb(explain, "Tell one request's life.", (LogConfig,), "DECISION_LOG"),
    "replay": Verb(replay, "Make a log's plans again and compare.", (LogConfig,), "DECISION_LOG"),
    "calibrate": Verb(
        calibrate, "Learn from a log what a step costs.", (LogConfig,), "DECISION_LOG"
    ),
    "simulate": Verb(simulate, "Try a policy on paper.", (SimulationConfig, SchedulerConfig)),
    "report": Verb(report, "Draw what bench measured.", (ReportConfig,), "FILE.json ..."),
    "info": Verb(info, "Show devices, versions, settings and programs.", ENGINE),
}

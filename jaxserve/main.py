"""The command line: `jaxserve VERB [--flags]`. Flags derive from the fields in config.py.

The only file that reads the environment. Errors that a user can mend are one line on stderr.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import os
import pathlib
import sys
import threading
import time
import tomllib
import types
import typing
from collections.abc import Callable

from absl import flags
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxserve.bench.settings import BenchConfig, ReportConfig, WorkloadConfig
from jaxserve.config import EngineConfig, SchedulerConfig, ServerConfig, setting
from jaxserve.progress import Progress

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
    """One thing the command line does. run(configs..., arguments) returns the exit status."""

    run: Callable[..., int]
    help: str
    configs: tuple[type, ...]
    arguments: str = ""


# ---- verbs --------------------------------------------------------------------------------------


def serve(
    engine_config: EngineConfig, scheduling: SchedulerConfig, server_config: ServerConfig, _
) -> int:
    from jaxserve.engine.async_engine import AsyncEngine
    from jaxserve.engine.start import build
    from jaxserve.obs.metrics import Metrics
    from jaxserve.server import app

    start = time.monotonic()
    with Progress(errors) as progress:
        parts = build(
            engine_config,
            scheduling,
            clock=time.monotonic,
            progress=progress,
            cache_dir=cache_dir(),
        )
        engine = AsyncEngine.from_parts(parts)
        metrics = Metrics(engine.stats, engine.model_name)
        engine.observe(metrics)

        def announce(url: str) -> None:
            """Called once the port is open; says how to use it once the engine is warm."""
            threading.Thread(
                target=_greet, args=(engine, url, progress, start), daemon=True
            ).start()

        app.serve(engine, server_config, metrics=metrics, on_listening=announce)
    return 0


def _greet(engine, url: str, progress: Progress, start: float) -> None:
    engine.wait_until_ready()
    progress.__exit__()
    body = f'{{"model": "{engine.model_name}", "messages": [{{"role": "user", "content": "Hi!"}}]}}'
    console.print(engine.description, soft_wrap=True, markup=False)
    console.print(f"memory: {engine.memory_table}", markup=False)
    console.print(f"ready after {time.monotonic() - start:.1f} s at {url}", markup=False)
    console.print(
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        soft_wrap=True,
        markup=False,
    )


def generate(
    engine_config: EngineConfig, scheduling: SchedulerConfig, sampling: SamplingConfig, prompts
) -> int:
    prompts = prompts or [sys.stdin.read()]
    llm = _load(engine_config, scheduling)
    for output in llm.generate(prompts, sampling.params()):
        console.print(f"{output.prompt}{output.outputs[0].text}", markup=False, soft_wrap=True)
    return 0


def chat(
    engine_config: EngineConfig, scheduling: SchedulerConfig, sampling: SamplingConfig, _
) -> int:
    """A conversation in the terminal; replies stream in, with their speed."""
    llm = _load(engine_config, scheduling)
    errors.print(f"{llm.engine.description}\n[dim]Empty line or Ctrl-D ends the chat.[/dim]")
    messages = [{"role": "system", "content": sampling.system}] if sampling.system else []
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except EOFError:
            line = ""
        if not line:
            return 0
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": _reply(llm, messages, sampling.params())})


def _reply(llm, messages, params) -> str:
    start, first, count, text = time.monotonic(), None, 0, ""
    for delta in llm.stream(llm.tokenizer.encode_chat(messages), params):
        first = first or time.monotonic()
        count += len(delta.token_ids)
        text += delta.text
        console.print(delta.text, end="", markup=False, soft_wrap=True)
    seconds = max(time.monotonic() - first, 1e-9)
    speed = f"{(count - 1) / seconds:.1f} tokens/s" if count > 1 else f"{count} token"
    console.print(f"\n[dim]first token {first - start:.2f} s, {speed}[/dim]")
    return text


def info(engine_config: EngineConfig, scheduling: SchedulerConfig, _) -> int:
    """Devices, versions, the settings as worked out, and the programs they need."""
    import importlib.metadata

    import jax

    llm = _load(engine_config, scheduling)
    table = Table(show_header=False, box=None)
    names = ("jaxserve", "jax", "jaxlib", "flax", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    devices = ", ".join(f"{d.id}: {d.device_kind}" for d in jax.devices())
    table.add_row("versions", versions)
    table.add_row("devices", f"{jax.default_backend()}: {devices}")
    table.add_row("runs", llm.engine.description)
    table.add_row("memory", str(llm.engine.memory_table))
    for field in dataclasses.fields(llm.config):
        table.add_row(f"--{field.name}", escape(str(getattr(llm.config, field.name))))
    for name, seconds in sorted(llm.engine.core.runner.compile_seconds.items()):
        table.add_row(f"program {name}", f"{seconds:.1f} s")
    console.print(table)
    return 0


def bench(workload, bench_config, engine_config, scheduling, arguments) -> int:
    from jaxserve.bench.run import Job, run

    if len(arguments) != 1:
        raise ValueError("bench: say what to measure, as in `jaxserve bench offline`")
    with Progress(errors) as progress:
        job = Job(engine_config, scheduling, workload, bench_config, console, cache_dir(), progress)
        return run(job, arguments[0])


def report(report_config: ReportConfig, files) -> int:
    from jaxserve.bench.report import write

    console.print(
        f"written to {write(files, pathlib.Path(report_config.report_dir))}", markup=False
    )
    return 0


def _load(engine_config: EngineConfig, scheduling: SchedulerConfig):
    from jaxserve.llm import LLM

    with Progress(errors) as progress:
        return LLM.from_config(engine_config, scheduling, progress=progress, cache_dir=cache_dir())


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
    "report": Verb(report, "Draw what bench measured.", (ReportConfig,), "FILE.json ..."),
    "info": Verb(info, "Show devices, versions, settings and programs.", ENGINE),
}


# ---- flags --------------------------------------------------------------------------------------


def cache_dir() -> pathlib.Path:
    """Where models and compiled programs are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "jaxserve"


def define_flags(configs: tuple[type, ...]) -> flags.FlagValues:
    """One flag for each field of the dataclasses, and --config for presets."""
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "Preset from configs/, by name.", flag_values=values)
    for config in configs:
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            define = _definer(hints[field.name], field.metadata.get("choices"))
            define(field.name, field.default, field.metadata["help"], flag_values=values)
    return values


def _definer(hint, choices):
    if choices:
        return lambda name, default, help, flag_values: flags.DEFINE_enum(
            name, default, choices, help, flag_values=flag_values
        )
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = next(k for k in kinds if k is not type(None))
    return {
        str: flags.DEFINE_string, int: flags.DEFINE_integer, float: flags.DEFINE_float,
        bool: flags.DEFINE_boolean,
    }[kind]  # fmt: skip


def preset(name: str) -> dict:
    """Settings of configs/NAME.toml."""
    folder = importlib.resources.files("jaxserve.configs")
    file = folder / f"{name}.toml"
    if "/" in name or not file.is_file():
        known = sorted(
            f.name.removesuffix(".toml") for f in folder.iterdir() if f.suffix == ".toml"
        )
        raise ValueError(
            f"--config={name}: there is no such preset; choose one of {', '.join(known)}"
        )
    return tomllib.loads(file.read_text())


def parse(verb: Verb, arguments: list[str]) -> tuple[list, list[str]]:
    """Configs made of preset and flags, explicit flags winning; and the other arguments."""
    values = define_flags(verb.configs)
    rest = values(["jaxserve", *arguments])[1:]
    chosen = preset(values.config) if values.config else {}
    known = {field.name for config in verb.configs for field in dataclasses.fields(config)}
    if unknown := chosen.keys() - known:
        raise ValueError(
            f"--config={values.config} sets {', '.join(sorted(unknown))}: unknown here"
        )
    configs = []
    for config in verb.configs:
        names = [field.name for field in dataclasses.fields(config)]
        settings = {name: values[name].value for name in names}
        settings |= {n: chosen[n] for n in names if n in chosen and not values[n].present}
        made = config(**settings)
        made.validate()
        configs.append(made)
    if rest and not verb.arguments:
        raise ValueError(f"unexpected argument {rest[0]!r}: settings are flags, as in --model=FILE")
    return configs, rest


# ---- help and the entry point -------------------------------------------------------------------


def show_verbs() -> None:
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, verb in VERBS.items():
        table.add_row(f"[bold]{name}[/bold] {escape(verb.arguments)}", verb.help)
    console.print("jaxserve serves language models from JAX. Usage: jaxserve VERB \\[--flags]\n")
    console.print(table)
    console.print("\njaxserve VERB --help lists the flags of a verb.")


def show_flags(name: str, verb: Verb) -> None:
    console.print(f"[bold]jaxserve {name}[/bold] {escape(verb.arguments)}\n{verb.help}\n")
    console.print("--config=NAME  a preset from configs/; flags given beside it win\n")
    for config in verb.configs:
        table = Table(title=config.__doc__.split(".")[0], title_justify="left", box=None)
        for column in ("flag", "default", ""):
            table.add_column(column, overflow="fold")
        for field in dataclasses.fields(config):
            default = "" if field.default is None else str(field.default)
            choices = field.metadata.get("choices")
            help = field.metadata["help"] + (f" One of: {', '.join(choices)}." if choices else "")
            table.add_row(f"--{field.name}", escape(default), escape(help))
        console.print(table)
        console.print()


def main(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h", "help"):
        show_verbs()
        return 0
    if name not in VERBS:
        raise ValueError(f"unknown verb {name!r}: choose one of {', '.join(VERBS)}")
    verb = VERBS[name]
    if {"--help", "-h"} & set(arguments):
        show_flags(name, verb)
        return 0
    configs, rest = parse(verb, arguments[1:])
    return verb.run(*configs, rest)


def run() -> typing.NoReturn:
    """Entry point of the `jaxserve` command."""
    try:
        status = main(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    except (ValueError, OSError, flags.Error) as error:
        line = " ".join(str(error).split())
        errors.print(f"jaxserve: {line}", style="red", markup=False, soft_wrap=True)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    run()

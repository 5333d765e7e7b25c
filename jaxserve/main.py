"""The command line: `jaxserve VERB [--flags]`. Flags derive from the fields in config.py.

The only file that reads the environment. Errors that a user can mend are one line on stderr.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import os
import pathlib
import sys
import tomllib
import types
import typing

from absl import flags
from rich.markup import escape
from rich.table import Table

from jaxserve.config import check_paths
from jaxserve.types import EngineFailed
from jaxserve.verbs import VERBS, Verb, console, errors

# ---- flags --------------------------------------------------------------------------------------


def cache_dir() -> pathlib.Path:
    """Where models and compiled programs are kept between runs."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError:
        raise ValueError("this user has no home folder: set HOME or XDG_CACHE_HOME") from None
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
        check_paths(made)
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
    return verb.run(*configs, rest, cache_dir())


def run() -> typing.NoReturn:
    """Entry point of the `jaxserve` command."""
    try:
        status = main(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    except (ValueError, OSError, EngineFailed, flags.Error) as error:
        line = " ".join(str(error).split())
        errors.print(f"jaxserve: {line}", style="red", markup=False, soft_wrap=True)
        status = 1
    _drop_what_cannot_be_written()
    sys.exit(status)


def _drop_what_cannot_be_written() -> None:
    """Python ends with a status of its own when a last flush fails, as on a full disk."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    run()

"""From the command line to the first token: with nothing compiled yet, and with programs kept.

Weights are in the model cache in both cases; what is timed is a new process each time.
"""

from __future__ import annotations

import pathlib
import subprocess
import tempfile
import time
from collections.abc import Callable

from jaxserve.bench import process
from jaxserve.config import EngineConfig, SchedulerConfig


def run(
    engine_config: EngineConfig,
    scheduling: SchedulerConfig,
    repeats: int,
    watch: Callable[[str, int, int], None] = lambda *_: None,
) -> list[dict]:
    """Seconds of a cold and a warm start, `repeats` times, each on a cache folder of its own.
    watch(which start, starts done, of how many) follows them."""
    flags = process.flags_of(engine_config, scheduling)
    runs = []
    for number in range(repeats):
        run = {}
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("cold", "warm"):
                watch(f"{kind} start", 2 * number + len(run), 2 * repeats)
                run[f"{kind}_s"] = first_token(flags, pathlib.Path(folder))
        runs.append(run)
    watch("", 2 * repeats, 2 * repeats)
    return runs


def first_token(flags: list[str], compile_cache: pathlib.Path) -> float:
    """Seconds until `jaxserve generate` has printed one token. ValueError when it fails."""
    flags = [*flags, f"--compile_cache={compile_cache}", "--max_tokens=1"]
    start = time.perf_counter()
    with subprocess.Popen(
        process.command("generate", *flags, "The capital of France is"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        printed = child.stdout.read(1)
        seconds = time.perf_counter() - start
        _, errors = child.communicate()
    if not printed:
        raise ValueError(f"the start failed: {errors.decode(errors='replace')[-500:]}")
    return seconds

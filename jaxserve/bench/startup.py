"""From the command line to the first token: with nothing compiled yet, and with programs kept.

Weights are in the model cache in both cases; what is timed is a new process each time.
"""

from __future__ import annotations

import pathlib
import subprocess
import tempfile
import time

from jaxserve.bench import process
from jaxserve.config import EngineConfig, SchedulerConfig


def run(engine_config: EngineConfig, scheduling: SchedulerConfig, repeats: int) -> list[dict]:
    """Seconds of a cold and a warm start, `repeats` times, each on a cache folder of its own."""
    flags = process.flags_of(engine_config, scheduling)
    runs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            seconds = [first_token(flags, pathlib.Path(folder)) for _ in ("cold", "warm")]
        runs.append({"cold_s": seconds[0], "warm_s": seconds[1]})
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

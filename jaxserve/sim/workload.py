"""Workloads: who asks what and when. Traces of real services, and generators.

A workload is an iterator of Arrivals in order of time, so a million of them need no memory. No
trace holds text: prompts are lengths, or ids of blocks that requests share.
"""

from __future__ import annotations

import csv
import dataclasses
import heapq
import itertools
import json
import math
import pathlib
from collections.abc import Iterator

import numpy as np

BLOCK_TOKENS = 512  # of a block id in the Mooncake traces


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """blocks: ids of the prompt's successive blocks; equal beginnings are equal prompts."""

    time: float  # seconds
    prompt: int  # tokens
    output: int
    tenant: str = ""
    priority: int = 0
    blocks: tuple[int, ...] = ()

    def prompt_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Tokens with the trace's lengths and shared beginnings; all zero without blocks."""
        if not self.blocks:
            return (0,) * self.prompt
        tokens = itertools.chain.from_iterable(
            itertools.repeat(block % vocab_size, BLOCK_TOKENS) for block in self.blocks
        )
        ids = tuple(itertools.islice(tokens, self.prompt))
        return ids + (0,) * (self.prompt - len(ids))


TRACES = {
    "azure_conv": "azure_llm_2023_conv.csv",
    "azure_code": "azure_llm_2023_code.csv",
    "mooncake_conversation": "mooncake_conversation.jsonl",
    "mooncake_synthetic": "mooncake_synthetic.jsonl",
    "burstgpt": "burstgpt3_head145_sessions.csv",
    "sharegpt_8min": "aibrix_sharegpt_8min_lengths.csv",
}


def read_trace(name: str, folder: pathlib.Path) -> Iterator[Arrival]:
    """The arrivals of a trace file in `folder`. Raises ValueError when it is not there."""
    yield from read_file(_trace_file(name, folder))


def read_file(path: pathlib.Path) -> Iterator[Arrival]:
    """The arrivals of a .csv with a header, or of a .jsonl: input_tokens and output_tokens, and
    where there are any arrival_s and session, in a .jsonl also hash_ids. KeyError for a line
    without the first two, ValueError or TypeError for one whose numbers are none.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = filter(str.strip, file)
        for record in map(json.loads, lines) if path.suffix == ".jsonl" else csv.DictReader(lines):
            arrival = Arrival(
                time=float(record.get("arrival_s", 0.0)),
                prompt=int(record["input_tokens"]),
                output=int(record["output_tokens"]),
                tenant=record.get("session") or "",
                blocks=tuple(record.get("hash_ids", ())) if path.suffix == ".jsonl" else (),
            )
            if not (0 <= arrival.time < math.inf and arrival.prompt >= 0 and arrival.output >= 0):
                raise ValueError(f"times and tokens are numbers from 0: {record}")
            yield dataclasses.replace(
                arrival, prompt=max(1, arrival.prompt), output=max(1, arrival.output)
            )


def _trace_file(name: str, folder: pathlib.Path) -> pathlib.Path:
    path = pathlib.Path(folder) / TRACES[name]
    if not path.is_file():
        raise ValueError(f"the trace {TRACES[name]} is not in {folder}; say where with --traces")
    return path


def skewed(seed: int = 0, count: int = 64) -> Iterator[Arrival]:
    """All at once: prompts of 16 to 512 tokens, log-uniform; outputs of 8 to 256, mostly short."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        prompt = int(math.exp(draw.uniform(math.log(16), math.log(513))))
        output = int(math.exp(draw.uniform(math.log(8), math.log(33))))
        if draw.random() < 0.2:
            output = int(draw.integers(128, 257))
        yield Arrival(0.0, prompt, output)


def poisson(
    rate: float,
    count: int,
    *,
    prompt: float = 500.0,
    output: float = 100.0,
    spread: float = 1.0,
    tenants: int = 1,
    seed: int = 0,
) -> Iterator[Arrival]:
    """`rate` requests a second at random moments, lengths log-normal about their medians.

    spread: standard deviation of the logarithm of a length.
    """
    draw = np.random.default_rng(seed)
    now = 0.0
    while count > 0:
        size = min(count, 4096)  # drawn in blocks: one at a time costs more than serving them
        gaps = draw.exponential(1 / rate, size)
        times = now + np.cumsum(gaps)
        prompts = np.maximum(1, prompt * np.exp(spread * draw.standard_normal(size))).astype(int)
        outputs = np.maximum(1, output * np.exp(spread * draw.standard_normal(size))).astype(int)
        owners = draw.integers(0, tenants, size)
        for time, length, tokens, owner in zip(
            times.tolist(), prompts.tolist(), outputs.tolist(), owners.tolist()
        ):
            yield Arrival(time, length, tokens, f"t{owner}" if tenants > 1 else "")
        now, count = float(times[-1]), count - size


def two_tenants(
    rate: float = 1.0, greed: float = 10.0, seconds: float = 600.0, seed: int = 0
) -> Iterator[Arrival]:
    """ "light" sends `rate` requests a second, "heavy" greed times as many."""
    light = poisson(rate, int(rate * seconds), seed=seed)
    heavy = poisson(greed * rate, int(greed * rate * seconds), seed=seed + 1)
    return merge(owned_by("light", light), owned_by("heavy", heavy))


def owned_by(tenant: str, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
    return (dataclasses.replace(arrival, tenant=tenant) for arrival in arrivals)


def merge(*workloads: Iterator[Arrival]) -> Iterator[Arrival]:
    """Several workloads at once, in order of time."""
    return heapq.merge(*workloads, key=lambda arrival: arrival.time)


def sped_up(arrivals: Iterator[Arrival], factor: float) -> Iterator[Arrival]:
    """The same requests, `factor` times as fast."""
    if factor == 1:
        return arrivals
    return (dataclasses.replace(a, time=a.time / factor) for a in arrivals)


def repeated(arrivals_of, times: int, period_s: float) -> Iterator[Arrival]:
    """The workload that arrivals_of() makes, several times, each period_s after the one before."""
    for turn in range(times):
        for arrival in arrivals_of():
            yield dataclasses.replace(arrival, time=arrival.time + turn * period_s)


def workload_size(name: str, *, traces: pathlib.Path, count: int) -> int:
    """About how many arrivals `workload` brings; ValueError for a trace that is not there."""
    if name not in TRACES:
        return count
    with _trace_file(name, traces).open("rb") as lines:
        return sum(1 for _ in lines)


def workload(name: str, *, traces: pathlib.Path, rate: float, count: int, seed: int = 0):
    """The arrivals called `name`. rate and count matter to the generated ones only."""
    if name in TRACES:
        return read_trace(name, traces)
    if name == "skewed":
        return skewed(seed, count)
    if name == "poisson":
        return poisson(rate, count, seed=seed)
    if name == "two_tenants":
        return two_tenants(rate, seconds=count / (11 * rate), seed=seed)
    known = ", ".join([*TRACES, "skewed", "poisson", "two_tenants"])
    raise ValueError(f"--workload={name}: choose one of {known}")

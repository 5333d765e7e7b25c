"""What is asked of an engine, and when: seeded workloads, the same for every engine.

Lengths and times are the simulator's (sim.workload) or made here; this adds the tokens. Prompts are
ids of common words, drawn with the seed, and outputs have fixed lengths (end tokens are ignored):
the work is the same whatever a model answers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve.bench.settings import WorkloadConfig
from jaxserve.sim import workload as sim_workload
from jaxserve.sim.workload import BLOCK_TOKENS, Arrival

_WORD = re.compile(r" [a-z]{3,9}")
_MAX_WORDS = 4000  # small ids are common words; stay with them
_OWN_TOKENS = 16  # prefix and sessions: tokens of a prompt that nobody shares
_TURNS = 4
_COUNT = 64


@dataclasses.dataclass(frozen=True)
class Item:
    """One request of a workload.

    arrival: seconds after the start, or with `after`, the id of another item, after that one ended.
    """

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    arrival: float = 0.0
    after: str | None = None
    prompt: str | None = None  # the same as text, where a file gave it


@dataclasses.dataclass(frozen=True)
class Workload:
    """cut: how many of the requests were longer and lost a part to fit the model's length."""

    name: str
    items: tuple[Item, ...]
    cut: int = 0

    def __str__(self) -> str:
        prompts = sum(len(item.prompt_ids) for item in self.items)
        outputs = sum(item.max_tokens for item in self.items)
        last = max((item.arrival for item in self.items if item.after is None), default=0.0)
        when = f", arriving over {last:,.0f} s" if last >= 1 else ""
        cut = f"; {self.cut:,} cut to the model's length" if self.cut else ""
        return (
            f"{self.name}: {len(self.items):,} requests, {prompts:,} tokens in, {outputs:,} out"
            f"{when}{cut}"
        )


def check(config: WorkloadConfig) -> None:
    """ValueError for a workload that is neither known by its name nor a file."""
    if config.workload in (*_MADE, *_SIMULATED):
        return
    path = _path(config)
    if path.suffix not in (".csv", ".json", ".jsonl"):
        raise ValueError(
            f"--workload={config.workload}: choose one of {', '.join((*_MADE, *_SIMULATED))}, or "
            "give the path of a .csv, .json or .jsonl file"
        )
    if not path.is_file():
        raise ValueError(f"--workload={config.workload}: there is no such file")


def make(config: WorkloadConfig, tokenizer, max_len: int) -> Workload:
    """The workload of these settings. max_len: tokens a sequence can have; longer ones of a trace
    are cut. ValueError for an unknown name, a file that does not read, a request that is too long.
    """
    check(config)
    cut = 0
    if config.workload in _MADE:
        name, items = config.workload, _MADE[config.workload](config, Words(config, tokenizer))
    elif config.workload in _SIMULATED or _is_trace(_path(config)):
        name = _path(config).stem
        items, cut = _of_arrivals(config, Words(config, tokenizer), max_len)
    else:
        name, items = _of_file(_path(config), config, tokenizer)
    if config.request_rate is not None:
        items = at_times(items, arrivals(len(items), config))
    for item in items:
        if (size := len(item.prompt_ids) + item.max_tokens) > max_len:
            raise ValueError(
                f"{item.id} of {name} has {size} tokens and the model length is {max_len}: ask for "
                "shorter ones, or raise --max_model_len"
            )
    return Workload(name, tuple(items), cut)


def _path(config: WorkloadConfig) -> pathlib.Path:
    return pathlib.Path(config.workload).expanduser()


def arrivals(count: int, config: WorkloadConfig) -> list[float]:
    """Times in seconds from 0; gaps are gamma distributed with mean 1 / request_rate."""
    shape = config.burstiness
    draw = np.random.default_rng([config.seed, 1])
    gaps = draw.gamma(shape, 1 / (config.request_rate * shape), count)
    return [0.0, *np.cumsum(gaps)[:-1].tolist()]


def at_times(items: Sequence[Item], times: Sequence[float]) -> list[Item]:
    """Arrivals anew, but for those that follow another item."""
    return [
        item if item.after else dataclasses.replace(item, arrival=time)
        for item, time in zip(items, times)
    ]


class Words:
    """Draws prompts from the ids that are a space and a short lowercase word: they read back as
    themselves in every engine."""

    def __init__(self, config: WorkloadConfig, tokenizer):
        ids = range(tokenizer.vocab_size)
        found = (i for i in ids if _WORD.fullmatch(tokenizer.token_text(i)))
        self.ids = tuple(itertools.islice(found, _MAX_WORDS))
        if not self.ids:
            raise ValueError("this tokenizer has no words to draw from; give a file of requests")
        self._seed = config.seed
        self.draw = np.random.default_rng([config.seed, 0])

    def prompt(self, count: int) -> tuple[int, ...]:
        return self._pick(self.draw, count)

    def of_blocks(self, blocks: Iterable[int], count: int) -> tuple[int, ...]:
        """A prompt whose successive blocks are the same wherever their ids are the same."""
        ids = ()
        for block in blocks:
            if len(ids) < count:
                ids += self._pick(np.random.default_rng([self._seed, 2, block]), BLOCK_TOKENS)
        return ids[:count] + self.prompt(max(count - len(ids), 0))

    def _pick(self, draw: np.random.Generator, count: int) -> tuple[int, ...]:
        return tuple(self.ids[i] for i in draw.integers(0, len(self.ids), count).tolist())


# ---- made here ----------------------------------------------------------------------------------


def _random(config: WorkloadConfig, words: Words) -> list[Item]:
    """Lengths uniform from half to one and a half of the means."""

    def length(mean: int) -> int:
        return int(words.draw.integers(max(mean // 2, 1), mean + mean // 2 + 1))

    return [
        Item(f"random-{n}", words.prompt(length(config.input_len)), length(config.output_len))
        for n in range(config.num_requests or _COUNT)
    ]


def _prefix(config: WorkloadConfig, words: Words) -> list[Item]:
    """Prompts that begin alike and differ in their last few tokens."""
    shared = words.prompt(config.input_len)
    return [
        Item(f"prefix-{n}", shared + words.prompt(_OWN_TOKENS), config.output_len)
        for n in range(config.num_requests or _COUNT)
    ]


def _sessions(config: WorkloadConfig, words: Words) -> list[Item]:
    """Conversations of four turns, each turn's prompt all that was said before and a bit more. The
    replies in it are drawn too, so that all engines get the same prompts."""
    items = []
    for session in range(max((config.num_requests or _COUNT) // _TURNS, 1)):
        said, before = words.prompt(config.input_len), None
        for turn in range(_TURNS):
            name = f"session-{session}-{turn}"
            items.append(Item(name, said, config.output_len, after=before))
            said, before = said + words.prompt(config.output_len + _OWN_TOKENS), name
    return items


_MADE = {"random": _random, "prefix": _prefix, "sessions": _sessions}


# ---- the simulator's, and files -----------------------------------------------------------------


_SIMULATED = ("skewed", "poisson")


def _is_trace(path: pathlib.Path) -> bool:
    """Whether a file holds lengths, not prompts."""
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8-sig", errors="replace") as lines:
            return '"input_tokens"' in next(lines, "")
    return path.suffix == ".csv"


def _of_arrivals(config: WorkloadConfig, words: Words, max_len) -> tuple[list[Item], int]:
    """Of a trace, or of a workload that the simulator knows by name; and how many it cut."""
    if config.workload in _SIMULATED:
        found = sim_workload.workload(
            config.workload,
            traces=pathlib.Path(),
            rate=config.request_rate or 1.0,
            count=config.num_requests or _COUNT,
            seed=config.seed,
        )
    else:
        found = sim_workload.read_file(_path(config))
    try:
        found = list(itertools.islice(found, config.num_requests))
        items = [_of_arrival(number, each, words, max_len) for number, each in enumerate(found)]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config.workload}: not a trace: {error!r}") from error
    if not items:
        raise ValueError(f"{config.workload}: no requests")
    whole = ((arrival.prompt, arrival.output) for arrival in found)
    cut = sum((len(i.prompt_ids), i.max_tokens) != sizes for i, sizes in zip(items, whole))
    return items, cut


def _of_arrival(number: int, arrival: Arrival, words: Words, max_len: int) -> Item:
    output = max(1, min(arrival.output, max_len // 2))
    prompt = words.of_blocks(arrival.blocks, min(arrival.prompt, max_len - output))
    return Item(f"request-{number}", prompt, output, arrival.time)


def _of_file(path: pathlib.Path, config: WorkloadConfig, tokenizer) -> tuple[str, list[Item]]:
    """Requests of a document {"name", "requests": [...]}, or one a line, each with prompt or
    prompt_ids and, if it likes, max_tokens, arrival_s and id."""
    try:
        if path.suffix == ".json":
            document = json.loads(path.read_text())
            name, rows = document.get("name", path.stem), document["requests"]
        else:
            lines = path.read_text().splitlines()
            name, rows = path.stem, [json.loads(line) for line in lines if line.strip()]
        items = [
            Item(
                str(row.get("id", f"{name}-{number}")),
                tuple(row.get("prompt_ids") or tokenizer.encode(row["prompt"])),
                int(row.get("max_tokens", config.output_len)),
                float(row.get("arrival_s", 0.0)),
                prompt=row.get("prompt"),
            )
            for number, row in enumerate(rows[: config.num_requests])
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a file of requests: {error!r}") from error
    if len({item.id for item in items}) < max(len(items), 1):
        raise ValueError(f"{path}: no requests, or two of the same id")
    if min(item.max_tokens for item in items) < 1:
        raise ValueError(f"{path}: max_tokens must be at least 1")
    if not all(0 <= item.arrival < math.inf for item in items):
        raise ValueError(f"{path}: arrival_s must be a number from 0")
    return name, items

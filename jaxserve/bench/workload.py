"""What is asked of an engine, and when: seeded workloads, the same for every engine.

Prompts are token ids of common words, drawn with the seed, and outputs have fixed lengths (end
tokens are ignored): the work is the same whatever a model answers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.bench import workload_files
from jaxserve.bench.settings import WorkloadConfig

_WORD = re.compile(r" [a-z]{3,9}")
_MAX_WORDS = 4000  # small ids are common words; stay with them
_OWN_TOKENS = 16  # prefix and sessions: tokens of a prompt that nobody shares
_TURNS = 4


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
    name: str
    items: tuple[Item, ...]

    def __str__(self) -> str:
        prompts = sum(len(item.prompt_ids) for item in self.items)
        outputs = sum(item.max_tokens for item in self.items)
        return f"{self.name}: {len(self.items)} requests, {prompts} tokens in, {outputs} out"


def make(config: WorkloadConfig, tokenizer, max_len: int) -> Workload:
    """The workload of these settings. max_len: tokens a sequence can have.

    Raises ValueError for an unknown name, a file that does not read, or a request that is too long.
    """
    draw = np.random.default_rng(config.seed)
    words = word_ids(tokenizer)
    prompt = lambda count: tuple(draw.choice(words, count).tolist())
    made = _MADE.get(config.workload)
    if made is not None:
        name, items = config.workload, made(config, draw, prompt)
    else:
        name, items = _from_file(config, tokenizer, words, max_len)
    if config.request_rate is not None:
        items = _at_times(items, arrivals(len(items), config.request_rate, config.burstiness, draw))
    too_long = [item for item in items if len(item.prompt_ids) + item.max_tokens > max_len]
    if too_long:
        size = len(too_long[0].prompt_ids) + too_long[0].max_tokens
        raise ValueError(
            f"{len(too_long)} requests of {name} do not fit the model length of {max_len}, the "
            f"first has {size} tokens: ask for shorter ones, or raise --max_model_len"
        )
    return Workload(name, tuple(items))


def word_ids(tokenizer) -> np.ndarray:
    """Ids of tokens that are a space and a short lowercase word: they read back as themselves."""
    found = (i for i in range(tokenizer.vocab_size) if _WORD.fullmatch(tokenizer.token_text(i)))
    ids = np.fromiter(found, np.int64)[:_MAX_WORDS]
    if not len(ids):
        raise ValueError("the tokenizer has no words to draw prompts from; give a file of requests")
    return ids


def arrivals(count: int, rate: float, burstiness: float, draw: np.random.Generator) -> list[float]:
    """Times in seconds from 0; gaps are gamma distributed with mean 1 / rate."""
    gaps = draw.gamma(burstiness, 1 / (rate * burstiness), count)
    return [0.0, *np.cumsum(gaps)[:-1].tolist()]


def _at_times(items: Sequence[Item], times: Sequence[float]) -> list[Item]:
    """Arrivals anew, but for those that follow another item."""
    return [
        item if item.after else dataclasses.replace(item, arrival=time)
        for item, time in zip(items, times)
    ]


# ---- made up ------------------------------------------------------------------------------------

Prompt = Callable[[int], tuple[int, ...]]


def _random(config: WorkloadConfig, draw, prompt: Prompt) -> list[Item]:
    """Lengths uniform from half to one and a half of the means."""
    length = lambda mean: int(draw.integers(max(mean // 2, 1), mean + mean // 2 + 1))
    return [
        Item(f"random-{n}", prompt(length(config.input_len)), length(config.output_len))
        for n in range(config.num_requests or 64)
    ]


def _skewed(config: WorkloadConfig, draw, prompt: Prompt) -> list[Item]:
    """Prompts of 16 to 512 tokens, log-uniform; outputs of 8 to 256, most short and few long."""

    def one(n: int) -> Item:
        length = round(math.exp(draw.uniform(math.log(16), math.log(512))))
        output = 256 if n % 16 == 5 else min(256, 8 + int(draw.exponential(40)))
        return Item(f"skewed-{n}", prompt(length), output)

    return [one(n) for n in range(config.num_requests or 64)]


def _prefix(config: WorkloadConfig, draw, prompt: Prompt) -> list[Item]:
    """Prompts that begin alike and differ in their last few tokens."""
    shared = prompt(config.input_len)
    return [
        Item(f"prefix-{n}", shared + prompt(_OWN_TOKENS), config.output_len)
        for n in range(config.num_requests or 64)
    ]


def _sessions(config: WorkloadConfig, draw, prompt: Prompt) -> list[Item]:
    """Conversations of four turns, each turn's prompt all that was said before and a bit more. The
    replies in it are drawn too, so that all engines get the same prompts."""
    items = []
    for session in range(max((config.num_requests or 64) // _TURNS, 1)):
        history, before = prompt(config.input_len), None
        for turn in range(_TURNS):
            name = f"session-{session}-{turn}"
            items.append(Item(name, history, config.output_len, after=before))
            history, before = history + prompt(config.output_len + _OWN_TOKENS), name
    return items


_MADE = {"random": _random, "skewed": _skewed, "prefix": _prefix, "sessions": _sessions}


# ---- from files ---------------------------------------------------------------------------------


def _from_file(config: WorkloadConfig, tokenizer, words, max_len: int) -> tuple[str, list[Item]]:
    name, rows = workload_files.read(config.workload, config.num_requests, tuple(_MADE))
    items = []
    for number, row in enumerate(rows):
        if "input_tokens" in row:
            items.append(_of_trace(number, row, config.seed, words, max_len))
            continue
        ids = row.get("prompt_ids") or tokenizer.encode(row["prompt"])
        arrival = float(row.get("arrival_s", 0.0))
        item_id = str(row.get("id", f"{name}-{number}"))
        output = int(row.get("max_tokens", config.output_len))
        items.append(Item(item_id, tuple(ids), output, arrival, prompt=row.get("prompt")))
    return name, items


def _of_trace(number: int, row: dict, seed: int, words, max_len: int) -> Item:
    """A request of a trace's lengths, cut to the model length. Rows that name a prefix block alike
    get the same tokens there."""
    output = max(1, min(int(row["output_tokens"]), max_len // 2))
    length = max(1, min(int(row["input_tokens"]), max_len - output))
    block = workload_files.TOKENS_PER_HASH
    ids = []
    for hash_id in row.get("hash_ids", ())[: -(-length // block)]:
        ids += np.random.default_rng([seed, 1, hash_id]).choice(words, block).tolist()
    if len(ids) < length:
        draw = np.random.default_rng([seed, 2, number])
        ids += draw.choice(words, length - len(ids)).tolist()
    return Item(f"trace-{number}", tuple(ids[:length]), output, float(row.get("arrival_s", 0.0)))

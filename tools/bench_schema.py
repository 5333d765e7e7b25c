"""What structured output costs: tokens a second with and without a schema, and the first mask.

    python tools/bench_schema.py                            # the demo model, 16 rows
    python tools/bench_schema.py --suite draft2020-12.json  # first masks of a file of schemas

Rows decode on one engine in this process: all without a schema, all with one, half and half, and
all without again. They take turns, so that a machine that slows down slows all of them: the median
steps of a round are compared, and of all rounds the median is shown, with the middle half of them.
What the last mix costs against the first is noise: no less than that can be told of the others.
A suite is a file of JSON, all of whose values of keys "schema" are compiled, each new, to its first
mask.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.bench import offline
from jaxserve.config import EngineConfig
from jaxserve.engine import start
from jaxserve.grammar import GrammarCompiler, GrammarRefused, GrammarSpec
from jaxserve.types import Request, SamplingParams

# As people ask for: objects with texts, numbers, a choice and a list. It never ends by itself.
SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["person", "place", "thing"]},
            "count": {"type": "integer", "minimum": 0},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["name", "kind", "count", "tags"],
        "additionalProperties": False,
    },
}
PLAIN, AGAIN = "plain", "plain again"
# The rows of each, as shares of all: without a schema, and with one.
MIXES = {PLAIN: (1, 0), "schema": (0, 1), "half and half": (0.5, 0.5), AGAIN: (1, 0)}


def decoding(engine, plain: int, constrained: int, temperature: float):
    """A core on which so many rows of each kind decode."""
    core = offline.fresh_core(engine, prefix_caching=False)
    prompts = [  # each its own, so that grammars are in states of their own
        tuple(engine.tokenizer.encode(f"A list of {number + 2} things, in JSON:\n"))
        for number in range(plain + constrained)
    ]
    params = dict(temperature=temperature, max_tokens=None, ignore_eos=True, seed=1)
    for number in range(plain):
        core.add(Request(f"plain {number}", prompts[number], SamplingParams(**params)))
    params["grammar"] = GrammarSpec.json_schema(SCHEMA)
    for number in range(constrained):
        constrained_params = SamplingParams(**params)
        matchers = core.output.matchers(constrained_params)
        core.add(Request(f"schema {number}", prompts[-1 - number], constrained_params), matchers)
    for _ in range(12):
        core.step()
    return core


def step_seconds(core, seconds: float) -> list[float]:
    """Of each step in so much time. Every row gets a token in each."""
    marks = [time.perf_counter()]
    while marks[-1] - marks[0] < seconds:
        for request_id, delta in core.step():
            assert delta.finish_reason is None, delta.error or f"{request_id} has ended"
        marks.append(time.perf_counter())
    return np.diff(marks).tolist()


def drop(core) -> None:
    """Ends what runs on the core, so that the next one finds the device free."""
    for sequence in core.scheduler._slots.running():
        core.abort(sequence.request.id)
    while core.has_work:
        core.step()


def throughput_table(engine, options) -> Table:
    medians = {mix: [] for mix in MIXES}  # seconds a step, of each round
    for _ in range(options.rounds):
        for mix, shares in MIXES.items():
            core = decoding(engine, *(int(options.rows * s) for s in shares), options.temperature)
            medians[mix].append(statistics.median(step_seconds(core, options.seconds)))
            drop(core)
    table = Table("tokens/s", "ms a step", "plain", "schema", "cost", "middle half")
    for mix, shares in MIXES.items():
        median = statistics.median(medians[mix])
        rates = [f"{options.rows * share / median:.0f}" if share else "" for share in shares]
        cells = ()
        if mix != PLAIN:
            low, middle, high = (f"{cost:+.1%}" for cost in costs(medians, mix))
            cells = middle, f"{low} to {high}"
        table.add_row(mix, f"{median * 1000:.2f}", *rates, *cells)
    return table


def costs(medians, mix: str) -> list[float]:
    """Share of tokens a second that each round's rows lose: the quartiles over the rounds."""
    rounds = np.array([medians[name] for name in (PLAIN, AGAIN, mix)])
    alone = rounds[0] if mix == AGAIN else rounds[:2].mean(axis=0)
    return np.quantile(1 - alone / rounds[2], (0.25, 0.5, 0.75)).tolist()


def schemas_in(value):
    """Every value of a key "schema" in the JSON."""
    if isinstance(value, dict):
        for key, part in value.items():
            if key == "schema":
                yield part
            else:
                yield from schemas_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from schemas_in(part)


def first_mask_table(compiler: GrammarCompiler, schemas: list) -> Table:
    """From a schema to the mask of its first token, and to the masks of its next."""
    seconds, refused = [], 0
    mask = np.zeros(compiler.mask_words, np.int32)
    for schema in schemas:
        begin = time.perf_counter()
        try:
            compiler.matcher(GrammarSpec.json_schema(schema)).fill_mask(mask)
        except GrammarRefused:
            refused += 1
        seconds.append(time.perf_counter() - begin)
    table = Table("schemas", "refused", "first mask, ms: median", "p99", "largest")
    ms = [f"{value * 1000:.1f}" for value in (*np.quantile(seconds, (0.5, 0.99)), max(seconds))]
    table.add_row(str(len(schemas)), str(refused), *ms)
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--suite", type=pathlib.Path, help="JSON file with more schemas")
    options = parser.parse_args()
    config = EngineConfig(model=options.model, num_slots=options.rows)
    engine = start.build(config, clock=time.perf_counter)
    engine.warm_up()
    console = Console(highlight=False)
    console.print(engine.description, soft_wrap=True, markup=False)
    begin = time.perf_counter()
    compiler = GrammarCompiler(engine.tokenizer, engine.model.config.vocab_size)
    console.print(f"{(time.perf_counter() - begin) * 1000:.0f} ms to read the vocabulary, once")
    schemas = [SCHEMA]
    if options.suite:
        schemas = list(schemas_in(json.loads(options.suite.read_text())))
    console.print(first_mask_table(compiler, schemas))
    console.print(throughput_table(engine, options))


if __name__ == "__main__":
    main()

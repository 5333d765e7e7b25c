"""How far each form of weights moves a model from float32: perplexity, and tokens that change.

    python tools/drift.py                                    # the demo model, 100,000 characters
    python tools/drift.py --model=FILE.gguf --forms float32 auto int8 auto/int16 auto//bfloat16
    python tools/drift.py --goldens=GOLDENS.json             # against another program's references

A form is what --weight_dtype takes and, after slashes, what --kv_dtype and --dtype take; `auto`, or
nothing, is what the engine serves when nobody asks. Steps are long, where arithmetic is coarsest.
The text is Python's own help topics, cut into windows that are scored apart. GOLDENS.json holds
prompts, the reference's greedy tokens, their log-probabilities and the gaps to the runners-up; it
takes the place of the text and of float32. Exit status 1 when a form's perplexity is off by --limit
percent.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from pydoc_data.topics import topics

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from jaxserve import LLM, SamplingParams

MAX_LEN = 2048
WINDOW = 2000  # tokens scored together
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=2)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of every scored position: the log-probability of the token that came, the likeliest token,
    and by how much that one beats the runner-up."""

    logprobs: np.ndarray
    likeliest: np.ndarray
    gaps: np.ndarray

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.logprobs.mean()))


@dataclasses.dataclass(frozen=True)
class Drift:
    """What changed against a reference. Log-probabilities are natural."""

    perplexity: float  # relative: 0.01 is one percent more
    mean: float  # of the differences of log-probabilities
    largest: float
    alike: float  # share of positions with the same likeliest token
    widest_flip: float  # the reference's largest gap at a position that is not alike


def compare(found: Scores, reference: Scores) -> Drift:
    apart = np.abs(found.logprobs - reference.logprobs)
    same = found.likeliest == reference.likeliest
    return Drift(
        perplexity=found.perplexity / reference.perplexity - 1,
        mean=float(apart.mean()),
        largest=float(apart.max()),
        alike=float(same.mean()),
        widest_flip=float(reference.gaps[~same].max(initial=0.0)),
    )


def text(characters: int) -> str:
    """Python's help topics in alphabetical order: English that every machine has."""
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    if characters > len(whole):
        raise SystemExit(f"--characters={characters}: this Python's topics have {len(whole)}")
    return whole[:characters]


def windows(ids: Sequence[int]) -> list[list[int]]:
    return [list(ids[start : start + WINDOW]) for start in range(0, len(ids), WINDOW)]


def score(llm: LLM, sequences: Sequence[list[int]], counts: Sequence[int]) -> Scores:
    """Scores of the last counts[i] tokens of sequences[i]."""
    entries = [
        entry
        for output, count in zip(llm.generate(sequences, SCORE), counts)
        for entry in output.prompt_logprobs[-count:]
    ]
    best, second = (np.array([entry.top[rank][1] for entry in entries]) for rank in (0, 1))
    return Scores(
        np.array([entry.logprob for entry in entries]),
        np.array([entry.top[0][0] for entry in entries]),
        best - second,
    )


def golden_scores(cases: Sequence[dict]) -> Scores:
    """The reference's own: it chose the likeliest token each time."""
    joined = (np.concatenate([case[k] for case in cases]) for k in ("logprobs", "output_ids"))
    return Scores(*joined, np.concatenate([case["gaps"] for case in cases]))


def load(model: str, form: str, compile_cache: str | None) -> LLM:
    weights, kv, dtype, *rest = *form.split("/"), "", ""
    if any(rest):
        raise ValueError(f"form {form!r}: at most three dtypes, as in auto/int16/float32")
    return LLM(
        model,
        weight_dtype=weights,
        kv_dtype=kv or "auto",
        dtype=dtype or "auto",
        max_model_len=MAX_LEN,
        num_slots=1,
        deterministic=True,  # one program
        compile_cache=compile_cache,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--model", default="demo", help="demo, a .gguf file, or a Hugging Face folder")
    option("--forms", nargs="+", default=["float32/float32/float32", "auto", "int8", "bfloat16"])
    option("--characters", type=int, default=100_000, help="length of the text")
    option("--goldens", type=pathlib.Path, help="references to compare with, in place of the text")
    option("--limit", type=float, default=2.0, help="percent of perplexity")
    option("--compile_cache", help="as the engine's flag")
    args = parser.parse_args()
    console = Console(highlight=False, width=140)
    sequences = reference = None
    if args.goldens:
        cases = json.loads(args.goldens.read_text(encoding="utf-8"))["cases"]
        sequences = [case["prompt_ids"] + case["output_ids"] for case in cases]
        counts = [len(case["output_ids"]) for case in cases]
        reference = golden_scores(cases)
    table = Table(
        Column("form", overflow="fold"), "weights", "KV", "activations", "MB", "perplexity",
        "drift", "log-prob. off: mean", "at most", "alike", "widest flip",
    )  # fmt: skip
    worst = 0.0
    for form in args.forms:
        llm = load(args.model, form, args.compile_cache)
        if sequences is None:
            sequences = windows(llm.tokenizer.encode(text(args.characters)))
            counts = [len(window) - 1 for window in sequences]
            console.print(f"{args.characters:,} characters, {sum(counts):,} tokens scored")
        found = score(llm, sequences, counts)
        reference = reference or found
        drift = compare(found, reference)
        worst = max(worst, abs(drift.perplexity))
        table.add_row(
            form, llm.config.weight_dtype, llm.config.kv_dtype, llm.config.dtype,
            f"{llm.engine.model.weight_bytes / 1e6:.1f}", f"{found.perplexity:.4f}",
            f"{drift.perplexity:+.3%}", f"{drift.mean:.2g}", f"{drift.largest:.2g}",
            f"{drift.alike:.2%}", f"{drift.widest_flip:.2g}",
        )  # fmt: skip
        console.print(f"{form}: perplexity {found.perplexity:.4f}, {drift.perplexity:+.3%}")
    console.print(table)
    console.print(f"drift against {args.goldens or args.forms[0]}: {worst:.3%} at most")
    return int(worst >= args.limit / 100)


if __name__ == "__main__":
    sys.exit(main())

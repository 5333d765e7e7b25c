"""Rows of traces and of request files.

A trace says lengths and times: .csv, or one JSON object a line, with input_tokens, output_tokens,
arrival_s where it has times and hash_ids where prompts share prefixes. A file of requests has
prompt or prompt_ids, and max_tokens: one object a line, or a document {"name", "requests": [...]}.
"""

from __future__ import annotations

import csv
import json
import pathlib
from collections.abc import Sequence

TOKENS_PER_HASH = 512  # of a prompt, for each of a row's hash_ids


def read(source: str, limit: int | None, known: Sequence[str]) -> tuple[str, list[dict]]:
    """(name, at most `limit` rows). ValueError says what is wrong, and which workloads exist."""
    path = pathlib.Path(source).expanduser()
    if path.suffix not in (".csv", ".json", ".jsonl") or not path.is_file():
        choices = ", ".join(known)
        raise ValueError(
            f"--workload={source}: give {choices}, or a .csv, .json or .jsonl file that exists"
        )
    name = path.stem
    try:
        if path.suffix == ".json":
            document = json.loads(path.read_text())
            name, rows = document.get("name", name), document["requests"][:limit]
        else:
            with path.open(newline="") as lines:
                rows = _first(csv.DictReader(lines) if path.suffix == ".csv" else lines, limit)
            rows = [json.loads(row) if isinstance(row, str) else row for row in rows]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{source}: not a file of requests or a trace: {error!r}") from error
    for number, row in enumerate(rows, 1):
        if not (
            {"prompt"} <= row.keys()
            or {"prompt_ids"} <= row.keys()
            or {"input_tokens", "output_tokens"} <= row.keys()
        ):
            raise ValueError(
                f"{source}, row {number}: needs prompt or prompt_ids, or input_tokens and "
                "output_tokens"
            )
    return name, rows


def _first(rows, limit: int | None) -> list:
    found = []
    for row in rows:
        if limit is not None and len(found) == limit:
            break
        if not isinstance(row, str) or row.strip():
            found.append(row)
    return found

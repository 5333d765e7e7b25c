"""The JSON document of a measurement: figures, and everything needed to judge or repeat them."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import pathlib
from collections.abc import Sequence

import orjson

from jaxserve.bench.metrics import median_of
from jaxserve.obs import manifest


def document(kind: str, label: str, runs: Sequence[dict], **facts) -> dict:
    """A measurement. kind: offline, serve, startup or sweep. runs: summaries, with `requests` and
    `steps` where they are kept. facts: model, config, workload and the like."""
    return {
        "kind": kind,
        "label": label,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # The load of others makes figures rough.
        "machine": manifest.machine() | {"load_1min": round(os.getloadavg()[0], 2)},
        "versions": manifest.versions(),
        **facts,
        "median": median_of(runs),
        "runs": list(runs),
    }


_EVERY = {"kind", "label", "made", "machine", "median", "runs"}  # what every document has


def write(path: str | pathlib.Path, documents: Sequence[dict]) -> None:
    option = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    pathlib.Path(path).write_bytes(
        orjson.dumps({"jaxserve_bench": 1, "results": documents}, option=option)
    )


def read(path: str | pathlib.Path) -> list[dict]:
    """The documents of a file that write() wrote; ValueError for any other."""
    try:
        data = orjson.loads(pathlib.Path(path).read_bytes())
        if data["jaxserve_bench"] == 1 and all(each.keys() >= _EVERY for each in data["results"]):
            return data["results"]
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"{path}: not a file that `jaxserve bench` wrote")


def by_workload(documents: Sequence[dict]) -> dict[str, list[dict]]:
    """Documents that asked for the same, by a title of it; those that asked for nothing are left
    out. Only figures of the same workload compare."""
    groups: dict[str, dict[str, list[dict]]] = {}
    for document in documents:
        if document["kind"] in ("growth", "startup"):
            continue
        asked = document.get("workload", {})
        variants = groups.setdefault(pathlib.Path(asked.get("workload") or "workload").stem, {})
        variants.setdefault(repr(sorted(asked.items())), []).append(document)
    return {
        title: group
        for name, variants in groups.items()
        for title, group in zip(_titles(name, list(variants.values())), variants.values())
    }


def _titles(name: str, groups: Sequence[Sequence[dict]]) -> list[str]:
    """The name of workloads that are called the same, and the settings in which they differ."""
    asked = [group[0].get("workload", {}) for group in groups]
    names = dict.fromkeys(itertools.chain.from_iterable(asked))
    varied = [key for key in names if len({repr(settings.get(key)) for settings in asked}) > 1]
    return [
        ", ".join(
            [name, *(f"{key}={settings[key]}" for key in varied if settings.get(key) is not None)]
        )
        for settings in asked
    ]


def engine_facts(engine) -> dict:
    """model and config of an engine.start.Engine."""
    model = engine.model
    return {
        "model": {
            "name": model.name,
            "weights_sha256": model.fingerprint,
            "weight_dtype": model.weight_dtype,
            "weight_bytes": model.weight_bytes,
        },
        "config": dataclasses.asdict(engine.config),
        "runs_with": engine.description,
        "memory": dataclasses.asdict(engine.memory_table),
    }

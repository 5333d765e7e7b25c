"""Block sizes as data: tuned/<device kind>/<op>.json, each with the measurement that chose it.

A file maps a key, which the op makes of its shapes, to the parameters and what was measured. An op
falls back to a heuristic of its own when its key is not there.
"""

from __future__ import annotations

import functools
import json
import pathlib

import jax

_FOLDER = pathlib.Path(__file__).parent / "tuned"


def device_kind() -> str:
    """Name of the device that is compiled for, as the folder of its data: "tpu_v6_lite"."""
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = (described or jax.devices()[0]).device_kind
    return kind.lower().replace(" ", "_").replace("-", "_")


def lookup(op: str, key: str, kind: str | None = None) -> dict | None:
    """The tuned parameters of an op at a key on a device kind (default: this one), or None."""
    entry = _table(kind or device_kind(), op).get(key)
    return None if entry is None else entry["parameters"]


@functools.cache
def _table(kind: str, op: str) -> dict:
    file = _FOLDER / kind / f"{op}.json"
    return json.loads(file.read_text()) if file.is_file() else {}

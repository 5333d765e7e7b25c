"""ParamSpec: a weight declared once. Random weights, shardings and loading derive from it.

The tree of a family is `{"embed": ParamSpec, ..., "layers": ({name: ParamSpec}, ...)}`: one dict a
layer, all alike. Parameters have the same tree, except that with stacked layers `params["layers"]`
is a single dict whose leaves have a leading L axis.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter of the model.

    axes: a logical name for each dimension, which sharding.py places on the mesh. A matrix
    multiplies activations ([out, in]) and takes the weight dtype and form asked for; anything else
    (norms, biases) stays float32. init: standard deviation of random weights, or None for ones.
    by_row: single rows are looked up in it, so it lies row after row on the device. A TPU prefers
    the other order for tables whose rows it would have to pad, and would turn them over each step.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    matrix: bool = False
    init: float | None = 0.02
    by_row: bool = False

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), self

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Path = tuple[str, int | None]  # parameter name, and its layer for those inside "layers"


def walk(specs: dict[str, Any]) -> Iterator[tuple[Path, ParamSpec]]:
    """Every parameter once: the top ones, then layer by layer."""
    for name, spec in specs.items():
        if name != "layers":
            yield (name, None), spec
    for index, layer in enumerate(specs["layers"]):
        for name, spec in layer.items():
            yield (name, index), spec


def assemble(specs: dict[str, Any], get: Callable[[Path, ParamSpec], Any]) -> dict[str, Any]:
    """The unstacked parameter tree, each leaf made by get(path, spec)."""
    params = {name: get((name, None), spec) for name, spec in specs.items() if name != "layers"}
    params["layers"] = tuple(
        {name: get((name, index), spec) for name, spec in layer.items()}
        for index, layer in enumerate(specs["layers"])
    )
    return params


def random_array(path: Path, spec: ParamSpec, seed: int) -> np.ndarray:
    """float32 values that depend on the seed and the parameter's own name alone."""
    if spec.init is None:
        return np.ones(spec.shape, np.float32)
    generator = np.random.default_rng([seed, zlib.crc32(repr(path).encode())])
    return generator.standard_normal(spec.shape, np.float32) * np.float32(spec.init)

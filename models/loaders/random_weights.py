"""A model without a checkpoint: seeded random weights for benches, shapes alone for compiling.

Both follow the family's ParamSpecs, so whatever is measured or compiled has the real model's
shapes, forms and shardings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.config import Backend
from jaxserve.models.loaders.checkpoint import LoadedModel, activation_dtype, read_config
from jaxserve.models.loaders.fill import fill
from jaxserve.models.sharding import partition, placement
from jaxserve.models.spec import ParamSpec, Path, assemble, random_array, walk


@dataclasses.dataclass(frozen=True)
class RandomTensor:
    """Stands where a checkpoint's tensor would: values made when they are asked for."""

    name: str
    spec: ParamSpec
    path: Path
    seed: int
    type_name: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def nbytes(self) -> int:
        return 4 * self.spec.size

    def array(self) -> np.ndarray:
        return random_array(self.path, self.spec, self.seed)


def random_model(
    config: Mapping[str, Any],
    *,
    backend: Backend,
    weight_dtype: str = "auto",
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
) -> LoadedModel:
    """A model of the config (config.json's content) with weights that depend on the seed alone."""
    family, parsed = read_config(config)
    parsed = dataclasses.replace(
        parsed, backend=backend, dtype=activation_dtype(weight_dtype, backend)
    )
    specs = family.param_specs(parsed)
    sources = {
        path: RandomTensor(family.HF_NAMES[path[0]].format(path[1]), spec, path, seed)
        for path, spec in walk(specs)
    }
    params, forms = fill(specs, sources, parsed, weight_dtype=weight_dtype, mesh=mesh)
    return LoadedModel(
        family=family,
        config=parsed,
        params=params,
        path=pathlib.Path("random"),
        name=f"random-{parsed.model_type}",
        eos_ids=frozenset(),
        weight_dtype="+".join(sorted(forms)),
        weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        fingerprint=f"random-{seed}-{hashlib.sha256(repr(parsed).encode()).hexdigest()}",
    )


def abstract_params(
    specs: Mapping[str, Any],
    *,
    matrix_dtype: Any = jnp.bfloat16,
    stacked: bool,
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Any]:
    """The parameter tree as ShapeDtypeStructs, to lower and compile without weights or devices.

    Matrices are plain arrays of matrix_dtype, as accelerators hold them; the rest is float32.
    """

    def leaf(path: Path, spec: ParamSpec, count: int | None = None) -> jax.ShapeDtypeStruct:
        shape = spec.shape if count is None else (count, *spec.shape)
        placed = None
        if mesh is not None:
            placed = placement(spec, partition(spec, mesh, stacked=count is not None))
        dtype = matrix_dtype if spec.matrix else jnp.float32
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

    params = assemble(specs, leaf)
    if stacked:
        layers = specs["layers"]
        params["layers"] = {
            name: leaf((name, 0), spec, len(layers)) for name, spec in layers[0].items()
        }
    return params

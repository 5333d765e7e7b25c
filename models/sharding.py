"""Where each parameter lies on the mesh: logical axes to a PartitionSpec, one rule a name.

A 1-D mesh with the axis "model" splits heads, MLP width and vocabulary (tensor parallelism); XLA
inserts the reductions. A dimension that the mesh does not divide stays whole on every device.
"""

from __future__ import annotations

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.spec import ParamSpec

AXIS = "model"
SPLIT = frozenset({"heads", "kv_heads", "ffn", "vocab", "experts"})


def make_mesh(devices=None) -> Mesh:
    """All devices on one axis."""
    return jax.make_mesh((len(devices or jax.devices()),), (AXIS,), devices=devices)


def placement(spec: ParamSpec, sharding):
    """The sharding, with the order of dimensions in memory where the parameter needs one."""
    if not spec.by_row:
        return sharding
    return Format(Layout(tuple(range(len(spec.shape)))), sharding)


def partition(spec: ParamSpec, mesh: Mesh, *, stacked: bool = False) -> NamedSharding:
    """The sharding of one parameter; stacked ones have a leading layer axis that stays whole."""
    size = mesh.shape[AXIS]
    names = [
        AXIS if axis in SPLIT and length % size == 0 else None
        for axis, length in zip(spec.axes, spec.shape)
    ]
    return NamedSharding(mesh, PartitionSpec(*([None] if stacked else []), *names))

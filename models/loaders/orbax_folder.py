"""Orbax: weights in a folder's `orbax/`, under the names that safetensors files use.

Shapes and dtypes come from the checkpoint's metadata without reading an array. Arrays are restored
one at a time onto the host and placed by the mesh of whoever loads: the sharding they were saved
with is ignored, since it names devices of another machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jaxserve.models.loaders.safetensors_file import DTYPES

SUBFOLDER = "orbax"
TYPE_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
IDENTITY_FILES = ("manifest.ocdbt", "_METADATA")


@dataclasses.dataclass(frozen=True)
class OrbaxTensor:
    """One array of a checkpoint, not yet read. keys: its place in the saved tree."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    nbytes: int
    folder: pathlib.Path
    keys: tuple[str, ...]
    identity: bytes
    part: slice = dataclasses.field(default_factory=lambda: slice(None))  # of its rows

    def array(self) -> np.ndarray:
        """The values, read at every call. ValueError naming the array if they are gone."""
        as_numpy = _nest(self.keys, ocp.RestoreArgs(restore_type=np.ndarray))
        args = ocp.args.PyTreeRestore(
            item=_nest(self.keys, 0), restore_args=as_numpy, partial_restore=True
        )
        try:
            with _checkpointer() as checkpointer:
                restored = checkpointer.restore(self.folder, args=args)
        except (ValueError, OSError, KeyError) as error:
            reason = str(error).partition(" [")[0]
            raise ValueError(
                f"{self.folder}: array {self.name} cannot be read: {reason}"
            ) from error
        for key in self.keys:
            restored = restored[key]
        return restored[self.part]

    def rows(self, start: int, stop: int) -> OrbaxTensor:
        """The tensor of some of the rows."""
        shape = (stop - start, *self.shape[1:])
        nbytes = self.nbytes // self.shape[0] * shape[0]
        return dataclasses.replace(self, shape=shape, nbytes=nbytes, part=slice(start, stop))

    def sample(self) -> bytes:
        """Bytes that tell this checkpoint from others."""
        return self.identity


def read_orbax(folder: pathlib.Path) -> dict[str, OrbaxTensor]:
    """Every array of folder/orbax by name; nested trees give names joined by dots."""
    root = (folder / SUBFOLDER).absolute()
    try:
        with _checkpointer() as checkpointer:
            tree = checkpointer.metadata(root).item_metadata.tree
    except (ValueError, OSError, KeyError, AttributeError) as error:
        raise ValueError(f"{root}: not a complete Orbax checkpoint: files are missing") from error
    digest = hashlib.sha256()
    for name in IDENTITY_FILES:
        digest.update((root / name).read_bytes() if (root / name).is_file() else b"")
    return {
        ".".join(keys): _describe(root, keys, leaf, digest.digest())
        for keys, leaf in _flatten(tree)
    }


def write_orbax(folder: pathlib.Path, arrays: Mapping[str, Any]) -> None:
    """Saves named arrays to folder/orbax, each device its own shards."""
    with _checkpointer() as checkpointer:
        checkpointer.save((folder / SUBFOLDER).absolute(), dict(arrays))


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _describe(root: pathlib.Path, keys: tuple[str, ...], leaf: Any, identity: bytes) -> OrbaxTensor:
    name, shape, dtype = ".".join(keys), tuple(leaf.shape), np.dtype(leaf.dtype)
    if dtype not in TYPE_NAMES:
        raise ValueError(f"{root}: array {name} has dtype {dtype}, which is not supported")
    nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return OrbaxTensor(name, TYPE_NAMES[dtype], shape, nbytes, root, keys, identity)


def _flatten(tree: Mapping[str, Any], above: tuple[str, ...] = ()):
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*above, key))
        else:
            yield (*above, key), value


def _nest(keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value

"""Many small arrays as one vector: a step's inputs cross to the device in one transfer.

A transfer costs the host tens of microseconds whatever its size, and a step has twenty inputs of a
few hundred bytes.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np


class Wire:
    """The layout of one pytree of bool, int32, uint32 and float32 arrays, fixed by an example."""

    def __init__(self, example):
        leaves, self._structure = jax.tree.flatten(example)
        assert all(leaf.dtype.itemsize in (1, 4) for leaf in leaves), "no 64-bit inputs"
        self._leaves = [(leaf.shape, leaf.dtype) for leaf in leaves]
        ends = np.cumsum([math.prod(shape) for shape, _ in self._leaves])
        self._starts = [0, *ends.tolist()]

    @property
    def shape(self) -> tuple[int]:
        return (self._starts[-1],)

    def pack(self, tree) -> np.ndarray:
        """A fresh int32 vector of the tree's numpy arrays, bit for bit."""
        out = np.empty(self.shape, np.int32)
        leaves, structure = jax.tree.flatten(tree)
        assert structure == self._structure
        for leaf, (shape, dtype), start, end in zip(
            leaves, self._leaves, self._starts, self._starts[1:]
        ):
            assert leaf.shape == shape and leaf.dtype == dtype, (leaf.shape, leaf.dtype)
            out[start:end] = leaf.ravel() if dtype.kind == "b" else leaf.view(np.int32).ravel()
        return out

    def unpack(self, vector: jax.Array):
        """The tree again, inside a compiled program."""
        leaves = []
        for (shape, dtype), start, end in zip(self._leaves, self._starts, self._starts[1:]):
            part = jax.lax.slice(vector, (start,), (end,)).reshape(shape)
            if dtype.kind == "b":
                part = part != 0
            elif dtype != jnp.int32:
                part = jax.lax.bitcast_convert_type(part, dtype)
            leaves.append(part)
        return jax.tree.unflatten(self._structure, leaves)

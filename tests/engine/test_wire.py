"""One vector carries every input bit for bit."""

import jax
import numpy as np
import pytest

from jaxserve.engine.wire import Wire

TREE = {
    "flags": np.array([True, False, True]),
    "ids": np.array([[-1, 2**31 - 1], [0, -(2**31)]], np.int32),
    "seed": np.array([2**32 - 1, 7], np.uint32),
    "floats": np.array([0.1, -0.0, np.inf, 1e-45], np.float32),
    "scalar": np.array(True),
    "empty": np.zeros((0, 3), np.int32),
}


def test_every_bit_arrives():
    wire = Wire(TREE)
    back = jax.jit(wire.unpack)(wire.pack(TREE))
    for name, sent in TREE.items():
        assert back[name].dtype == sent.dtype and back[name].shape == sent.shape
        assert np.asarray(back[name]).tobytes() == sent.tobytes(), name


def test_vectors_are_fresh():
    wire = Wire(TREE)
    assert not np.shares_memory(wire.pack(TREE), wire.pack(TREE))


@pytest.mark.parametrize("wrong", [np.zeros(2, np.int64), np.zeros(3, np.int32)])
def test_another_shape_or_dtype_never_passes(wrong):
    wire = Wire({"ids": np.zeros(2, np.int32)})
    with pytest.raises(AssertionError):
        wire.pack({"ids": wrong})

"""Pages go to the host and come back as they were, into other places, and nothing else moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.host_kv import PAGES_AT_ONCE, HostKV
from jaxserve.pallas_kernels.ragged_paged_attention import api as attention

NUM_PAGES = 60


def filled(dtype):
    """A cache in which every number differs from its neighbours'."""
    spec = attention.KVSpec(
        num_layers=2, num_kv_heads=2, head_dim=64, page_size=4, dtype=jnp.dtype(dtype)
    )
    empty = attention.init_kv_pages(spec, NUM_PAGES, "reference")
    number = lambda a: jnp.asarray(np.arange(a.size).reshape(a.shape) % 97, a.dtype)
    return jax.tree.map(number, empty)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_there_and_back(dtype):
    kv_pages = filled(dtype)
    before = jax.tree.map(lambda a: np.array(a), kv_pages)
    count = PAGES_AT_ONCE + 3  # more than one turn
    away, back = range(1, 1 + count), range(59, 59 - count, -1)
    hosts = [(7 * i) % 25 for i in range(count)]
    host_kv = HostKV(kv_pages, 25)
    host_kv.keep(kv_pages, list(zip(away, hosts)))
    after = host_kv.restore(kv_pages, list(zip(hosts, back)))
    for was, now in zip(jax.tree.leaves(before), jax.tree.leaves(after)):
        now = np.asarray(now)
        np.testing.assert_array_equal(now[:, list(back)], was[:, list(away)])
        rest = sorted(set(range(NUM_PAGES)) - set(back))
        np.testing.assert_array_equal(now[:, rest], was[:, rest])

"""HostKV: KV pages of preempted sequences in the host's memory.

Which page is where is decided by the scheduler (scheduler/host_pages.py); this copies. Pages travel
a fixed number at a time, so two compiled programs do for any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

PAGES_AT_ONCE = 16


def _take(kv_pages, page_C):
    """Pages of every array, [L, C, ...] each."""
    return jax.tree.map(lambda array: jnp.take(array, page_C, axis=1), kv_pages)


def _put(kv_pages, page_C, content):
    """Writes pages. DONATES kv_pages. Numbers past the last page are dropped."""
    write = lambda array, part: array.at[:, page_C].set(part, mode="drop")
    return jax.tree.map(write, kv_pages, content)


class HostKV:
    """Memory for num_pages pages of a KV cache whose arrays are [L, G, ...], pages second."""

    def __init__(self, kv_pages, num_pages: int):
        self._num_device_pages = jax.tree.leaves(kv_pages)[0].shape[1]
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), kv_pages)
        page_C = jax.ShapeDtypeStruct((PAGES_AT_ONCE,), np.int32)
        self._take = jax.jit(_take).lower(shapes, page_C).compile()
        content = jax.eval_shape(_take, shapes, page_C)
        self._put = jax.jit(_put, donate_argnums=0).lower(shapes, page_C, content).compile()
        # Memory is taken when it is first written to.
        self._pages = jax.tree.map(
            lambda a: np.zeros((a.shape[0], num_pages, *a.shape[2:]), a.dtype), kv_pages
        )

    def keep(self, kv_pages, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages to the host: (page, host page) each. Waits for the steps before."""
        for part in _parts(pairs):
            page_C, host = self._padded([page for page, _ in part]), [h for _, h in part]
            taken = self._take(kv_pages, page_C)
            for kept, content in zip(jax.tree.leaves(self._pages), jax.tree.leaves(taken)):
                kept[:, host] = np.asarray(content)[:, : len(part)]

    def restore(self, kv_pages, pairs: Sequence[tuple[int, int]]):
        """Copies pages back: (host page, page) each. DONATES kv_pages; returns the new ones."""
        for part in _parts(pairs):
            host, page_C = [h for h, _ in part], self._padded([page for _, page in part])
            content = jax.tree.map(lambda kept, host=host: _widened(kept[:, host]), self._pages)
            kv_pages = self._put(kv_pages, page_C, content)
        return kv_pages

    def _padded(self, pages: list[int]) -> np.ndarray:
        """int32 [C]; the rest are numbers that no page has."""
        page_C = np.full(PAGES_AT_ONCE, self._num_device_pages, np.int32)
        page_C[: len(pages)] = pages
        return page_C


def _parts(pairs: Sequence[tuple[int, int]]):
    return (pairs[at : at + PAGES_AT_ONCE] for at in range(0, len(pairs), PAGES_AT_ONCE))


def _widened(pages: np.ndarray) -> np.ndarray:
    """A fresh array of PAGES_AT_ONCE pages that begins with these."""
    wide = np.zeros((pages.shape[0], PAGES_AT_ONCE, *pages.shape[2:]), pages.dtype)
    wide[:, : pages.shape[1]] = pages
    return wide

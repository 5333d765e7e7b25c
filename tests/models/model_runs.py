"""Runs a loaded model over the paged cache the way the engine does, to compare with goldens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.ragged_paged_attention import api

PAGE = 16
BUCKET = 64  # packed tokens of a step, at most


@functools.partial(
    jax.jit, static_argnames=("forward", "logits", "config", "backend"), donate_argnames="kv_pages"
)
def step(params, token_ids_T, positions_T, kv_pages, batch, *, forward, logits, config, backend):
    attend = functools.partial(api.ragged_paged_attention, batch=batch, backend=backend)

    def bound(q, k, v, pages, **settings):
        return attend(q, k, v, pages, **settings)

    hidden_TD, kv_pages = forward(params, config, token_ids_T, positions_T, kv_pages, bound)
    return logits(params, config, hidden_TD), kv_pages


class Row:
    """One sequence on a cache of its own. A step's tokens are padded up to one of the sizes."""

    def __init__(self, model, max_tokens, sizes=(1, BUCKET)):
        self.model, self.sizes, self.length = model, sizes, 0
        self.backend = model.config.backend.attention
        pages = -(-max_tokens // PAGE)
        spec = model.config.kv_spec(PAGE, jnp.float32)
        self.kv_pages = api.init_kv_pages(spec, pages + 1, self.backend)
        # Reversed, so that a table taken for granted would show.
        self.table = np.arange(pages, 0, -1, dtype=np.int32)[None]

    def feed(self, ids, chunk=None):
        """float64 logits [len(ids), V] of every position fed, in chunks of at most `chunk`."""
        rows, chunk = [], chunk or self.sizes[-1]
        for start in range(0, len(ids), chunk):
            rows.append(self._step(ids[start : start + chunk]))
        return np.concatenate(rows)

    def _step(self, ids):
        count = len(ids)
        T = next(size for size in self.sizes if size >= count)
        token_ids = np.full(T, -1, np.int32)  # padding
        token_ids[:count] = ids
        positions = np.zeros(T, np.int32)
        positions[:count] = np.arange(self.length, self.length + count)
        self.length += count
        batch = api.RaggedBatch(
            page_table_SP=jnp.asarray(self.table),
            kv_len_S=jnp.asarray([self.length], jnp.int32),
            cu_q_len_S1=jnp.asarray([0, count], jnp.int32),
            num_rows=jnp.asarray([1], jnp.int32),
            num_decode=jnp.asarray([int(count == 1)], jnp.int32),
        )
        logits, self.kv_pages = step(
            self.model.params,
            jnp.asarray(token_ids),
            jnp.asarray(positions),
            self.kv_pages,
            batch,
            forward=self.model.family.forward,
            logits=self.model.family.logits,
            config=self.model.config,
            backend=self.backend,
        )
        return np.float64(logits[:count])


def greedy(row, logits_V, count):
    """`count` greedy tokens after logits_V, and the log-probability of each."""
    ids, logprobs = [], []
    for _ in range(count):
        best = int(np.argmax(logits_V))
        peak = logits_V.max()
        logprobs.append(logits_V[best] - peak - np.log(np.exp(logits_V - peak).sum()))
        ids.append(best)
        logits_V = row.feed([best])[-1]
    return ids, np.array(logprobs)

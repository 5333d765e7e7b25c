"""The TPU kernel's writing of a step's new keys and values into their pages.

Pages change in groups of as many tokens as one memory tile holds: fetch the group, put the new
tokens in, send it back. `plan` and `refs` are those of tpu_body.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .tpu_numbers import LANES

WRITE_BUFFERS = 4
WRITE_LEAD = 2  # groups whose reads are in flight before the first is merged


def write_groups(refs, plan):
    """Writes every group of the step, WRITE_LEAD of them in flight ahead of the merge."""
    num_groups = refs.counts[1]

    def copy(i, kind):
        """kind 0: a group's old slots in; 1: its new tokens in; 2: the merged group out."""
        buffer = i % WRITE_BUFFERS
        sem = refs.write_sems.at[kind, buffer]
        page, slot, token, low = (refs.group[field, i] for field in range(4))
        if kind == 1:
            if plan.tile_tokens == 1:
                here, count = pl.ds(low, 1), 1
                token = token + low
            else:
                here, count = slice(None), plan.group_tokens
            new = refs.new_kv.at[pl.ds(token, count)]
            return pltpu.make_async_copy(new, refs.new.at[buffer, here], sem)
        slots = pl.ds(pl.multiple_of(slot, plan.group_tokens), plan.group_tokens)
        page += refs.layer[0] * plan.pages_per_layer
        place, old = refs.pages.at[page, :, slots], refs.old.at[buffer]
        return pltpu.make_async_copy(*((place, old) if kind == 0 else (old, place)), sem)

    @pl.loop(0, num_groups + WRITE_LEAD)
    def _(i):
        @pl.when(i < num_groups)
        def _():
            @pl.when(i >= WRITE_BUFFERS)
            def _():
                copy(i - WRITE_BUFFERS, 2).wait()

            copy(i, 0).start()
            copy(i, 1).start()

        @pl.when(i >= WRITE_LEAD)
        def _():
            ready = i - WRITE_LEAD
            copy(ready, 0).wait()
            copy(ready, 1).wait()
            merge(refs, plan, ready)
            copy(ready, 2).start()

    @pl.loop(jnp.maximum(num_groups - WRITE_BUFFERS, 0), num_groups)
    def _(i):
        copy(i, 2).wait()


def merge(refs, plan, i):
    """Puts new tokens among a group's old ones. Slots after them hold nothing yet: zeros."""
    buffer = i % WRITE_BUFFERS
    low, high = refs.group[3, i], refs.group[4, i]
    slot = jax.lax.broadcasted_iota(jnp.int32, (plan.group_tokens, LANES), 0)
    for c in range(refs.new.shape[2]):
        old = refs.old[buffer, c].astype(jnp.float32)
        new = jnp.where(slot < high, refs.new[buffer, :, c], 0)
        merged = jnp.where(slot < low, old, new)
        if refs.old.dtype == jnp.int8:
            merged = merged.astype(jnp.int32)
        refs.old[buffer, c] = merged.astype(refs.old.dtype)

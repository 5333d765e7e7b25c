"""Sampling against a plain numpy oracle that sorts, and against counts known beforehand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine import logits as logit_transforms
from jaxserve.engine import sample
from jaxserve.engine.state import SamplingInputs, init_state, row_settings, set_row
from jaxserve.types import RequestRefused, SamplingParams

DEFAULTS = dict(
    temperature_S=1.0, top_k_S=0, top_p_S=1.0, min_p_S=0.0, repetition_S=1.0, presence_S=0.0,
    frequency_S=0.0, num_prompt_S=0, masks_ends_S=False,
)  # fmt: skip
DTYPES = dict(top_k_S=np.int32, num_prompt_S=np.int32, masks_ends_S=bool)


def inputs(rows, **values):
    """SamplingInputs of `rows` rows; a scalar serves every row. seed: one for each row."""
    fields = {}
    for name, default in DEFAULTS.items():
        value = np.broadcast_to(values.pop(name, default), (rows,))
        fields[name] = jnp.asarray(value.astype(DTYPES.get(name, np.float32)))
    seed = np.broadcast_to(values.pop("seed", 0), (rows,)).astype(np.uint32)
    flags = dict.fromkeys(("any_penalty", "any_bias", "any_truncation"), True)
    flags["any_logprobs"] = False
    assert not values, values
    return SamplingInputs(
        seed_S2=jnp.asarray(np.stack([np.zeros_like(seed), seed], 1)),
        **{name: jnp.asarray(flag) for name, flag in flags.items()},
        **fields,
    )


draw = jax.jit(functools.partial(sample.sample, backend="reference"))
truncate = jax.jit(sample._truncate)


def many_draws(logits_V, count, **values):
    """`count` draws from one distribution, at positions 0, 1, 2, ..."""
    rows = 250
    found = []
    tiled_SV = jnp.asarray(np.tile(np.float32(logits_V), (rows, 1)))
    for start in range(0, count, rows):
        position_S = jnp.arange(start, start + rows, dtype=jnp.int32)
        found.append(np.asarray(draw(tiled_SV, inputs(rows, **values), position_S)))
    return np.concatenate(found)[:count]


def oracle_support(logits_V, temperature, top_k, top_p, min_p):
    """Probabilities after truncation, by sorting, in float64."""
    x = np.float64(logits_V) / temperature
    order = np.argsort(-x, kind="stable")
    keep = np.zeros(len(x), bool)
    keep[order[: top_k or len(x)]] = True
    p = np.where(keep, np.exp(x - x.max()), 0)
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    keep[order] &= before < top_p
    keep &= p >= min_p * p.max()
    p = np.where(keep, p, 0)
    return p / p.sum()


@pytest.mark.parametrize("top_k", [None, -1, 0, 1, 5, 32, 33, 10**9])
def test_top_k_keeps_exactly_k_of_equal_logits(top_k):
    k = SamplingParams(top_k=top_k).top_k
    seen = set(many_draws(np.zeros(32), 2000, top_k_S=k, seed=3).tolist())
    expected = 32 if k == 0 else min(k, 32)
    assert len(seen) == expected
    assert seen == set(range(expected))  # of equals the lower ids


@pytest.mark.parametrize("top_k", [-2, 1.5, True, "3"])
def test_top_k_refuses_what_has_no_meaning(top_k):
    with pytest.raises(RequestRefused, match="top_k"):
        SamplingParams(top_k=top_k)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 7, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.1, 9, 0.9, 0.05),
    ],
)
def test_frequencies_match_the_sorting_oracle(temperature, top_k, top_p, min_p):
    logits_V = np.random.default_rng(0).normal(0, 2, 300).astype(np.float32)
    expected = oracle_support(logits_V, temperature, top_k, top_p, min_p)
    tokens = many_draws(
        logits_V,
        8000,
        temperature_S=temperature,
        top_k_S=top_k,
        top_p_S=top_p,
        min_p_S=min_p,
        seed=11,
    )
    counts = np.bincount(tokens, minlength=300)
    assert not counts[expected == 0].any()
    # 5 standard deviations of a binomial count, and one for the rare ones
    allowed = 5 * np.sqrt(8000 * expected * (1 - expected)) + 1
    assert (np.abs(counts - 8000 * expected) <= allowed).all()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(0, 40), st.floats(0.05, 1), st.floats(0, 0.5),
    st.booleans(),
)  # fmt: skip
def test_truncation_keeps_what_sorting_keeps(seed, top_k, top_p, min_p, with_ties):
    rng = np.random.default_rng(seed)
    logits_V = rng.normal(0, 3, 64).astype(np.float32)
    if with_ties:
        logits_V = np.round(logits_V)
    expected = oracle_support(logits_V, 1.0, top_k, top_p, min_p) > 0
    below_SV = jnp.asarray((logits_V.max() - logits_V)[None])
    kept = np.isfinite(truncate(below_SV, inputs(1, top_k_S=top_k, top_p_S=top_p, min_p_S=min_p)))
    differs = np.flatnonzero(kept[0] != expected)
    # Equal tokens on the nucleus' edge stay together; elsewhere a token may differ only when its
    # running sum meets top_p to float32 rounding, which the oracle decides in float64.
    for token in differs:
        p = oracle_support(logits_V, 1.0, top_k, 1.0, 0.0)
        above = p[logits_V > logits_V[token]].sum()
        on_edge = (
            abs(above - top_p) < 1e-5 or abs(p[logits_V >= logits_V[token]].sum() - top_p) < 1e-5
        )
        tied = (logits_V == logits_V[token]).sum() > 1 and above < top_p
        assert on_edge or tied


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-40, 0.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tiny_temperatures_are_greedy(temperature, dtype):
    logits_SV = jnp.asarray([[2.9, 11.1, -2.4, -np.inf]], dtype).astype(jnp.float32)
    tokens = [
        int(
            draw(logits_SV, inputs(1, temperature_S=temperature, seed=s), jnp.zeros(1, jnp.int32))[
                0
            ]
        )
        for s in range(20)
    ]
    assert tokens == [1] * 20


def test_keys_follow_seed_and_position_only():
    first = many_draws(np.zeros(50), 250, seed=7)
    assert (first == many_draws(np.zeros(50), 250, seed=7)).all()
    assert (first != many_draws(np.zeros(50), 250, seed=8)).any()
    chi_square = ((np.bincount(first, minlength=50) - 5.0) ** 2 / 5.0).sum()
    assert chi_square < 100  # 49 degrees of freedom: p(>100) = 2e-5
    # The same seed and position in another row, among other seeds.
    rows, at = 8, 3
    seeds, positions = np.full(rows, 99), np.full(rows, 1000, np.int32)
    seeds[at], positions[at] = 7, 42
    logits_SV = jnp.zeros((rows, 50), jnp.float32)
    assert int(draw(logits_SV, inputs(rows, seed=seeds), jnp.asarray(positions))[at]) == first[42]


def test_padded_vocabulary_is_never_chosen():
    logits_SV = jnp.zeros((250, 96), jnp.float32).at[:, 80].set(50.0)
    masked_SV = logit_transforms.mask_padded_vocabulary(logits_SV, 32)
    greedy = inputs(250, temperature_S=0)
    assert (np.asarray(draw(masked_SV, greedy, jnp.zeros(250, jnp.int32))) == 0).all()
    tokens = draw(masked_SV, inputs(250, seed=1), jnp.arange(250, dtype=jnp.int32))
    assert int(tokens.max()) < 32
    assert len(set(tokens.tolist())) > 20


def test_broken_logits_are_reported_not_sampled():
    logits_SV = jnp.zeros((3, 40), jnp.float32).at[1, 17].set(jnp.nan).at[2].set(-jnp.inf)
    tokens = draw(logits_SV, inputs(3, seed=1), jnp.zeros(3, jnp.int32)).tolist()
    assert tokens[0] >= 0 and tokens[1:] == [-1, -1]


def test_penalties_by_hand():
    """Prompt [1, 2, 2], output [2, 3, 3]: divided or multiplied once, counted over output only."""
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=1.0)
    state = init_state(None, num_slots=2, history_len=8, vocab_size=6, hidden_size=4)
    row = row_settings([1, 2, 2, 2, 3, 3], params, (), 8, 6)
    state = set_row(state, jnp.int32(1), row)
    logits_SV = jnp.asarray([[1.0, 2.0, -1.0, 0.5, 3.0, -2.0]])
    shaped = logit_transforms.transform(
        logits_SV,
        state,
        inputs(1, repetition_S=1.3, presence_S=0.5, frequency_S=1.0, num_prompt_S=3),
        jnp.asarray([1], jnp.int32),
        jnp.asarray([6], jnp.int32),
    )
    expected = [1.0, 2.0 / 1.3, -1.0 * 1.3 - 1 - 0.5, 0.5 / 1.3 - 2 - 0.5, 3.0, -2.0]
    np.testing.assert_allclose(shaped[0], expected, rtol=1e-6)


def test_bias_and_the_min_tokens_mask():
    params = SamplingParams(logit_bias={5: -100, 0: 2.5}, stop_token_ids=[3], min_tokens=2)
    state = init_state(None, num_slots=1, history_len=4, vocab_size=6, hidden_size=4)
    state = set_row(state, jnp.int32(0), row_settings([1], params, {2}, 4, 6))

    def shaped(masks_ends):
        return logit_transforms.transform(
            jnp.ones((1, 6), jnp.float32),
            state,
            inputs(1, masks_ends_S=masks_ends),
            jnp.zeros(1, jnp.int32),
            jnp.ones(1, jnp.int32),
        )[0].tolist()

    assert shaped(False) == [3.5, 1, 1, 1, 1, -99]
    assert shaped(True) == [3.5, 1, -np.inf, -np.inf, 1, -99]


def test_logprobs_of_the_chosen_and_the_best():
    logits_SV = np.random.default_rng(5).normal(0, 1, (2, 40)).astype(np.float32)
    exact = np.float64(logits_SV)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    chosen_S, ids_SK, top_SK = sample.top_logprobs(jnp.asarray(logits_SV), jnp.asarray([7, 8]), 20)
    np.testing.assert_allclose(chosen_S, exact[[0, 1], [7, 8]], atol=1e-5)
    order = np.argsort(-exact, axis=1)[:, :20]
    assert (np.asarray(ids_SK) == order).all()
    np.testing.assert_allclose(top_SK, np.take_along_axis(exact, order, 1), atol=1e-5)

"""Rotations against closed forms: every type, precision far out, and what is refused."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.rope import Rope, cos_sin, make_rope


def rope(head_dim=64, max_positions=4096, **parameters):
    return make_rope(
        {"rope_theta": 10000.0, **parameters}, head_dim=head_dim, max_positions=max_positions
    )


def plain(theta, dim):
    return theta ** (-np.arange(0, dim, 2) / dim)


def test_default_frequencies_fall_geometrically():
    assert rope().scale == 1.0
    np.testing.assert_allclose(rope().inv_freq, plain(10000.0, 64), rtol=1e-14)


def test_linear_divides_every_frequency():
    got = rope(rope_type="linear", factor=4.0).inv_freq
    np.testing.assert_allclose(got, plain(10000.0, 64) / 4, rtol=1e-14)


def test_partial_rotation_has_frequencies_over_its_own_width():
    got = rope(partial_rotary_factor=0.25).inv_freq
    np.testing.assert_allclose(got, plain(10000.0, 16), rtol=1e-14)


def llama3(**changes):
    settings = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    settings |= dict(original_max_position_embeddings=8192, rope_theta=500000.0) | changes
    return np.array(rope(rope_type="llama3", head_dim=128, **settings).inv_freq)


def test_llama3_keeps_fast_divides_slow_and_blends_between():
    base = plain(500000.0, 128)
    wavelength = 2 * math.pi / base
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    got = llama3()
    np.testing.assert_allclose(got[fast], base[fast], rtol=1e-12)
    np.testing.assert_allclose(got[slow], base[slow] / 8, rtol=1e-12)
    between = ~fast & ~slow
    smooth = (8192 / wavelength - 1) / 3
    want = (1 - smooth) * base / 8 + smooth * base
    assert between.sum() >= 3
    np.testing.assert_allclose(got[between], want[between], rtol=1e-12)


def test_llama3_with_an_empty_band_divides_by_no_zero():
    got = llama3(high_freq_factor=1.0)
    base = plain(500000.0, 128)
    slow = 2 * math.pi / base > 8192
    np.testing.assert_allclose(got, np.where(slow, base / 8, base), rtol=1e-12)


def yarn(**changes):
    settings = dict(factor=4.0, original_max_position_embeddings=32768, rope_theta=1e6) | changes
    return rope(rope_type="yarn", head_dim=128, **settings)


def test_yarn_ends_are_kept_and_interpolated():
    got, base = np.array(yarn().inv_freq), plain(1e6, 128)
    np.testing.assert_allclose(got[:20], base[:20], rtol=1e-12)
    np.testing.assert_allclose(got[-10:], base[-10:] / 4, rtol=1e-12)
    assert (np.diff(got / base) <= 1e-12).all()


def test_yarn_correction_range_is_rounded_unless_told_otherwise():
    """Pair that turns r times within n positions: d ln(n / 2 pi r) / (2 ln base)."""
    at = lambda turns: 128 * math.log(32768 / (2 * math.pi * turns)) / (2 * math.log(1e6))
    base = plain(1e6, 128)
    rounded, exact = (math.floor(at(32)), math.ceil(at(1))), (at(32), at(1))
    for truncate, (low, high) in ((True, rounded), (False, exact)):
        share = np.clip((np.arange(64) - low) / (high - low), 0, 1)
        got = np.array(yarn(truncate=truncate).inv_freq)
        np.testing.assert_allclose(got, base * (share / 4 + 1 - share), rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"factor": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
    ],
)
def test_yarn_attention_scale(settings, scale):
    assert yarn(**settings).scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("position", [4, 500, 8000, 32000])
def test_phases_hold_far_out_in_a_bfloat16_model(position):
    """B053: bfloat16 frequencies are off by 1.8 at 32,000; the last cast alone may round."""
    cos, sin = cos_sin(rope(), jnp.array([position], jnp.int32))
    phase = position * plain(10000.0, 64)
    for table, exact in ((cos, np.cos(phase)), (sin, np.sin(phase))):
        cast = np.float64(table[0].astype(jnp.bfloat16))
        assert np.abs(cast - exact).max() < 5e-3
        assert np.abs(np.float64(table[0]) - exact).max() < 4e-3


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}, "longrope"),
        ({"type": "su"}, "longrope"),
        ({"rope_type": "mrope", "mrope_section": [1]}, "mrope"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "disagree"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": "4"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
        ({"mrope_section": [2, 1, 1]}, "mrope_section"),
        ({"partial_rotary_factor": 0.3}, "even"),
    ],
)
def test_what_is_unknown_or_half_known_is_refused_by_name(parameters, named):
    with pytest.raises(ValueError, match=named):
        rope(**parameters)


def test_equal_rotations_are_equal_and_hashable():
    assert rope() == rope(rope_type="default") and len({rope(), rope(type="default")}) == 1
    assert rope() != rope(rope_theta=20000.0)
    assert isinstance(rope(), Rope)

"""The best token of each row: every backend against numpy, with ties, masks and broken logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.best_token import cpu, reference

BACKENDS = {"reference": jax.jit(reference.best_token)} | {
    isa: jax.jit(functools.partial(cpu.best_token, isa=isa)) for isa in native.isas()[:3]
}
SIZES = [1, 16, 31, 33, 255, 256, 257, 1000]


@pytest.fixture(params=BACKENDS)
def best(request):
    """best(logits_SV, allowed_SV=None) -> list of tokens."""

    def run(logits_SV, allowed_SV=None):
        masks = () if allowed_SV is None else (words(allowed_SV),)
        return BACKENDS[request.param](jnp.asarray(logits_SV, jnp.float32), *masks).tolist()

    return run


def words(allowed_SV):
    """Bit id % 32 of word id // 32."""
    padding = -allowed_SV.shape[1] % 32
    bits_SV = np.pad(allowed_SV, ((0, 0), (0, padding)), constant_values=True)
    return jnp.asarray(np.packbits(bits_SV, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_first_of_the_largest(best, vocab_size):
    logits_SV = np.random.default_rng(vocab_size).integers(-3, 3, (5, vocab_size))
    logits_SV[4] = -0.0
    assert best(logits_SV) == logits_SV.argmax(1).tolist()
    fine_SV = np.random.default_rng(1).normal(0, 3, (5, vocab_size)).astype(np.float32)
    assert best(fine_SV) == fine_SV.argmax(1).tolist()


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_the_largest_that_is_allowed(best, vocab_size, share):
    random = np.random.default_rng(vocab_size)
    logits_SV = random.integers(-3, 3, (6, vocab_size)).astype(np.float32)
    allowed_SV = random.random((6, vocab_size)) < share
    allowed_SV[0], allowed_SV[1], allowed_SV[2] = False, True, False
    allowed_SV[2, -1] = True
    want_S = np.where(allowed_SV, logits_SV, -np.inf).argmax(1)
    want_S[~allowed_SV.any(1)] = -1
    assert best(logits_SV, allowed_SV) == want_S.tolist()


def test_broken_logits_have_no_best(best):
    logits_SV = np.zeros((5, 300), np.float32)
    logits_SV[1, 290], logits_SV[2], logits_SV[3, 7], logits_SV[4, :299] = (
        np.nan, -np.inf, np.inf, -np.inf
    )  # fmt: skip
    assert best(logits_SV) == [0, -1, -1, -1, 299]
    assert best(-logits_SV)[1] == -1  # a NaN with the sign bit
    finite_SV = np.isfinite(logits_SV)
    assert best(logits_SV, finite_SV) == [0, 0, -1, 0, 299]  # what is forbidden is not looked at


def test_masks_by_bits():
    """Ids in the sign bit and in the last, unfinished word too."""
    for vocab_size in (64, 70, 384):
        allowed_SV = np.zeros((2, vocab_size), bool)
        allowed_SV[1, [31, 32, 63, vocab_size - 1]] = True
        allowed_SV[0] = True
        ones_SV = jnp.ones((2, vocab_size), jnp.float32)
        masked_SV = np.asarray(reference.masked(ones_SV, words(allowed_SV)))
        np.testing.assert_array_equal(masked_SV, np.where(allowed_SV, 1, -np.inf))

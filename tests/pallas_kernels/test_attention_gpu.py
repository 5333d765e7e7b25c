"""The GPU kernels in Pallas' interpreters, against float64, and lowered for CUDA.

What the GPU's compiler makes of them: test_deviceless.py.
"""

import concurrent.futures
import copy
import functools
import multiprocessing
import sys

import attention_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.ragged_paged_attention import api, gpu, reference, shapes

BY_NAME = {shape.name: shape for shape in shapes.SHAPES}
# Two decode rows, the second in two splits of 512; a chunk in the middle of its row; an empty row.
ROWS = shapes.BatchShape("rows", ((1, 33), (1, 530), (20, 47), (0, 0)), pad_rows=1, pad_tokens=3)
# The same with a chunk of more blocks than are in flight, and tiles that end within a block.
LONG_ROWS = shapes.BatchShape(
    "long", ((1, 33), (1, 530), (45, 350), (0, 0)), pad_rows=1, pad_tokens=3
)
HEADS_OF_80 = shapes.HeadShape("heads of 80", 32, 32, 80)
GROUP_OF_71 = shapes.HeadShape("group of 71", 71, 1, 96)
MOSAIC = pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="jax 0.10 has no interpreter of it; 0.11's wants each barrier's last phase waited for",
)
ROUNDED = 2.0**-8  # how far bfloat16 is from a number, at most, as a part of it
AUTO = jax.sharding.AxisType.Auto
H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=1, platform="gpu")
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def run(module, case, shape, dtype, page_dtype=None, **options):
    backend = "gpu" if module is gpu else "reference"
    q, k, v, pages, batch, sinks = shapes.place(case, backend, dtype, page_dtype)
    attend = functools.partial(
        module.ragged_paged_attention,
        layer=1, scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap, **options,
    )  # fmt: skip
    compiled = jax.jit(attend).lower(q, k, v, pages, batch, sinks=sinks).compile(QUICK)
    out, pages = compiled(q, k, v, pages, batch, sinks=sinks)
    return np.asarray(out, np.float32), pages


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma-2-9b", "gpt-oss-20b", "phi-3-mini"])
def test_equals_float64(name):
    """NaN in every slot that no token owns; head sizes 64, 96 and 256, windows, sinks, soft cap."""
    shape = BY_NAME[name].scaled(heads=2, window=24)
    case = shapes.make_case(shape, ROWS, page_size=16, layers=2, layer=1, seed=9)
    want, cache = oracle.attend(case, shape, layer=1)
    out, pages = run(gpu, case, shape, jnp.float32, interpret=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=5e-6)
    owned = ~np.isnan(cache)
    np.testing.assert_array_equal(np.asarray(pages.data)[owned], cache[owned].astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("page_dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_eight_bits(page_dtype):
    """Equal to the reference, which test_attention_reference.py proves for 8 bits."""
    shape = BY_NAME["llama-3-8b"].scaled(heads=2, window=24)
    case = shapes.make_case(shape, ROWS, page_size=16, layers=2, layer=1, seed=10)
    want, _ = run(reference, case, shape, jnp.float32, page_dtype)
    out, _ = run(gpu, case, shape, jnp.float32, page_dtype, interpret=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=5e-6)


@pytest.fixture(scope="module")
def elsewhere():
    """A process whose XLA has threads enough for all warpgroups to wait for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPROC", "16")
        patch.setenv("JAX_PLATFORMS", "cpu")
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            yield lambda *args: pool.submit(run_mosaic, *args).result(timeout=300)


def run_mosaic(case, shape, page_dtype):
    """Races between copies, warpgroups and matmuls are errors."""
    out, pages = run(gpu, case, shape, jnp.bfloat16, page_dtype, kernel="mosaic", interpret=True)
    return out, np.asarray(pages.data, np.float32)


def make_rounded(shape, page_size):
    """-> (a case of numbers that bfloat16 has, the same with the absolute values of V)."""
    case = shapes.make_case(shape, LONG_ROWS, page_size=page_size, layers=2, layer=1, seed=9)
    for name in ("q_THE", "k_TJE", "v_TJE", "cache_LGJ2KE"):
        setattr(case, name, getattr(case, name).astype(jnp.bfloat16).astype(np.float32))
    positive = copy.deepcopy(case)
    positive.v_TJE = np.abs(case.v_TJE)
    positive.cache_LGJ2KE[:, :, :, 1] = np.abs(case.cache_LGJ2KE[:, :, :, 1])
    return case, positive


def assert_rounded_twice(out, want, want_of_positive):
    """bfloat16 rounds each probability, so sum(p |v|) bounds what that adds up to, and the output.

    All else is float32: products of bfloat16 are exact in it, and exp2 is off by some 2e-7.
    """
    np.testing.assert_array_less(
        np.abs(out - want), ROUNDED * (want_of_positive + np.abs(want)) + 1e-5
    )


@MOSAIC
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "page_size"),
    [
        (BY_NAME["smollm2"], 256),
        (BY_NAME["gemma-2-9b"], 32),
        (BY_NAME["gpt-oss-20b"], 16),
        (GROUP_OF_71, 128),
        (HEADS_OF_80, 64),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_mosaic_equals_float64(elsewhere, shape, page_size):
    """As test_equals_float64; a group that takes two warpgroups, pages in a block and around it,
    heads that 64 does not divide."""
    shape = shape.scaled(heads=2, window=24)
    case, positive = make_rounded(shape, page_size)
    want, cache = oracle.attend(case, shape, layer=1)
    out, pages = elsewhere(case, shape, "bfloat16")
    assert_rounded_twice(out, want, oracle.attend(positive, shape, layer=1)[0])
    owned = ~np.isnan(cache)
    np.testing.assert_array_equal(pages[owned], cache[owned].astype(np.float32))


@MOSAIC
@pytest.mark.slow
@pytest.mark.parametrize("page_dtype", ["int8", "float8_e4m3fn"])
def test_mosaic_eight_bits(elsewhere, page_dtype):
    """As test_eight_bits. bfloat16 has every code, so the bound is that of bfloat16 caches."""
    shape = BY_NAME["llama-3-8b"].scaled(heads=2, window=24)
    case, positive = make_rounded(shape, page_size=16)
    want, of_positive = (
        run(reference, case, shape, jnp.float32, page_dtype)[0] for case in (case, positive)
    )
    out, _ = elsewhere(case, shape, page_dtype)
    assert_rounded_twice(out, want, of_positive)


ALL_SHAPES = [*shapes.SHAPES, HEADS_OF_80, GROUP_OF_71]
LOWERED = [
    *(
        ("triton", shape, kv)
        for shape in ALL_SHAPES
        for kv in ("bfloat16", "int8", "float8_e4m3fn")
    ),
    *(("mosaic", shape, "bfloat16") for shape in ALL_SHAPES),
    *(("mosaic", shape, "int8") for shape in (shapes.SHAPES[0], HEADS_OF_80)),
    ("mosaic", shapes.SHAPES[0], "float8_e4m3fn"),
]


@pytest.mark.parametrize(
    ("kernel", "shape", "kv_dtype"), LOWERED, ids=lambda value: getattr(value, "name", value)
)
def test_lowers_for_cuda(kernel, shape, kv_dtype):
    """Both launches of every shape at full size, with this version of jax and no GPU."""
    rows, tokens, pages = 8, 64, 32
    array = lambda *dims, dtype=jnp.int32: jax.ShapeDtypeStruct(dims, dtype)
    bf16 = functools.partial(array, dtype=jnp.bfloat16)
    batch = api.RaggedBatch(array(rows, pages), array(rows), array(rows + 1), array(1), array(1))
    attend = functools.partial(
        gpu.ragged_paged_attention,
        layer=1, scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap, kernel=kernel,
    )  # fmt: skip
    arguments = (
        bf16(tokens, shape.H, shape.E),
        bf16(tokens, shape.J, shape.E),
        bf16(tokens, shape.J, shape.E),
        api.kv_page_specs(api.KVSpec(2, shape.J, shape.E, 16, kv_dtype), 64, "gpu"),
        batch,
    )
    sinks = array(shape.H, dtype=jnp.float32) if shape.sinks else None
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(AUTO,), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(attend, donate_argnums=3).trace(*arguments, sinks=sinks)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    call = {"triton": "custom_call @__gpu$xla.gpu.triton", "mosaic": "custom_call @mosaic_gpu"}
    assert text.count(call[kernel]) == 2


def test_a_jax_without_triton_uses_mosaic(monkeypatch):
    assert gpu.launcher().__name__.endswith("gpu_triton")
    monkeypatch.delattr("jax.experimental.pallas.triton")
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delitem(sys.modules, gpu.launcher().__name__)
    assert gpu.launcher().__name__.endswith("gpu_mosaic")


def test_what_mosaic_does_not_serve_is_told_with_a_remedy():
    shape = BY_NAME["smollm2"]
    case = shapes.make_case(shape, ROWS, page_size=16, layers=2, layer=1)
    with pytest.raises(ValueError, match=r"float32 cache.*attention_backend=reference"):
        run(gpu, case, shape, jnp.float32, kernel="mosaic")

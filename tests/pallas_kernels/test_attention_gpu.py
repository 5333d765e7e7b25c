"""The GPU kernel in Pallas' interpreter, against float64, and lowered to Triton's language.

What the GPU's compiler makes of it: test_deviceless.py.
"""

import functools
import importlib
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
HEADS_OF_80 = shapes.HeadShape("heads of 80", 32, 32, 80)
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


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [*shapes.SHAPES, HEADS_OF_80], ids=lambda shape: shape.name)
def test_lowers_for_cuda(shape, kv_dtype):
    """Both launches of every shape at full size, with this version of jax and no GPU."""
    rows, tokens, pages = 8, 64, 32
    array = lambda *dims, dtype=jnp.int32: jax.ShapeDtypeStruct(dims, dtype)
    bf16 = functools.partial(array, dtype=jnp.bfloat16)
    batch = api.RaggedBatch(array(rows, pages), array(rows), array(rows + 1), array(1), array(1))
    attend = functools.partial(
        gpu.ragged_paged_attention,
        layer=1, scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap,
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
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 2


def test_a_jax_without_triton_is_told_by_name(monkeypatch):
    monkeypatch.delattr("jax.experimental.pallas.triton")
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delitem(sys.modules, gpu.__name__)
    with pytest.raises(ValueError, match="attention_backend=reference"):
        importlib.import_module(gpu.__name__)

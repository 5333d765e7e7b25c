"""Models without a checkpoint: seeded values, and shapes that match what loading would give."""

import jax
import jax.numpy as jnp
import numpy as np
from tiny_checkpoints import LLAMA, QWEN2

from jaxserve.models.config import Backend
from jaxserve.models.loaders.checkpoint import read_config
from jaxserve.models.loaders.random_weights import abstract_params, random_model
from jaxserve.models.sharding import make_mesh, partition
from jaxserve.models.spec import ParamSpec


def leaves(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model.params)]


def test_weights_depend_on_the_seed_and_nothing_else():
    first, again, other = (
        leaves(random_model(LLAMA, backend=Backend(), seed=seed)) for seed in (1, 1, 2)
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other))


def test_stacked_weights_are_the_same_weights():
    plain = random_model(LLAMA, backend=Backend()).params["layers"]
    stacked = random_model(LLAMA, backend=Backend(stacked=True)).params["layers"]
    for name, leaf in stacked.items():
        np.testing.assert_array_equal(leaf, np.stack([layer[name] for layer in plain]))


def test_shapes_alone_match_a_loaded_tree():
    for stacked in (False, True):
        model = random_model(QWEN2, backend=Backend(stacked=stacked), weight_dtype="bfloat16")
        specs = model.family.param_specs(model.config)
        shapes = abstract_params(specs, stacked=stacked, mesh=make_mesh())
        assert jax.tree.structure(shapes) == jax.tree.structure(model.params)
        for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(model.params)):
            assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)


def test_embeddings_lie_row_after_row_and_nothing_else_is_told_how_to():
    family, config = read_config(LLAMA)
    shapes = abstract_params(family.param_specs(config), stacked=True, mesh=make_mesh())
    assert shapes.pop("embed").format.layout.major_to_minor == (0, 1)
    assert all(leaf.format.layout is None for leaf in jax.tree.leaves(shapes))


def test_logical_axes_are_split_where_the_mesh_divides_them():
    mesh = jax.sharding.AbstractMesh((4,), ("model",))
    split = lambda shape, axes, **options: tuple(
        partition(ParamSpec(shape, axes), mesh, **options).spec
    )
    assert split((64, 32), ("heads", None)) == ("model", None)
    assert split((32, 64), (None, "ffn")) == (None, "model")
    assert split((62, 32), ("vocab", None)) == (None, None)
    assert split((64, 32), ("kv_heads", None), stacked=True) == (None, "model", None)
    assert split((32,), (None,)) == (None,)


def test_random_weights_have_the_declared_spread():
    family, config = read_config(LLAMA)
    model = random_model(LLAMA, backend=Backend())
    assert family.param_specs(config)["embed"].init == 0.02
    assert abs(np.std(model.params["embed"]) - 0.02) < 1e-3
    assert (model.params["final_norm"] == jnp.ones(32)).all()

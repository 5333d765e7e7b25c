"""Orbax checkpoints saved on four devices and read on one, on two, and with pieces gone (B067)."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny_checkpoints import LLAMA, random_tensors, write_folder

from jaxserve import models
from jaxserve.models.config import Backend
from jaxserve.models.loaders.orbax_folder import read_orbax, write_orbax

SAVE_ON_FOUR = """
import pathlib, sys, jax, numpy as np, safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec
from jaxserve.models.loaders.orbax_folder import write_orbax
from jaxserve.models.sharding import make_mesh
folder, mesh = pathlib.Path(sys.argv[1]), make_mesh()
assert mesh.size == 4
split = lambda a: NamedSharding(mesh, PartitionSpec("model") if a.ndim == 2 else PartitionSpec())
arrays = safetensors.numpy.load_file(folder / "model.safetensors")
write_orbax(folder, {name: jax.device_put(a, split(a)) for name, a in arrays.items()})
"""
LOAD_ON_TWO = """
import pathlib, sys, jax, numpy as np
from jaxserve import models
from jaxserve.models.config import Backend
from jaxserve.models.sharding import make_mesh
mesh = make_mesh()
model = models.load(pathlib.Path(sys.argv[1]), backend=Backend(), mesh=mesh)
layer = model.params["layers"][0]
for name, axis in (("q", 0), ("o", 1), ("down", 1), ("attn_norm", None)):
    leaf = layer[name]
    assert leaf.sharding.mesh == mesh and len(leaf.addressable_shards) == 2
    shard = list(leaf.shape)
    if axis is not None:
        shard[axis] //= 2
    assert leaf.addressable_shards[0].data.shape == tuple(shard), (name, shard)
np.savez(sys.argv[2], **{name: np.asarray(leaf) for name, leaf in layer.items()})
"""


def run(code, devices, *args):
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "HOME": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder whose weights exist as Orbax only, saved by a process with four devices."""
    folder = write_folder(tmp_path_factory.mktemp("saved") / "model", LLAMA)
    run(SAVE_ON_FOUR, 4, folder)
    (folder / "model.safetensors").unlink()
    return folder


def test_one_device_reads_what_four_saved(saved):
    tensors, model = random_tensors(LLAMA), models.load(saved, backend=Backend())
    for name, part in (("q", "self_attn.q_proj"), ("down", "mlp.down_proj")):
        for index, layer in enumerate(model.params["layers"]):
            want = tensors[f"model.layers.{index}.{part}.weight"]
            np.testing.assert_array_equal(layer[name], want)
    np.testing.assert_array_equal(model.params["lm_head"], tensors["lm_head.weight"])


def test_two_devices_get_the_engines_sharding(saved, tmp_path):
    run(LOAD_ON_TWO, 2, saved, tmp_path / "layer.npz")
    layer, tensors = np.load(tmp_path / "layer.npz"), random_tensors(LLAMA)
    np.testing.assert_array_equal(layer["up"], tensors["model.layers.0.mlp.up_proj.weight"])
    np.testing.assert_array_equal(layer["k"], tensors["model.layers.0.self_attn.k_proj.weight"])


def test_names_and_shapes_come_without_reading_arrays(saved):
    found, tensors = read_orbax(saved), random_tensors(LLAMA)
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: array.shape for name, array in tensors.items()
    }
    assert {tensor.type_name for tensor in found.values()} == {"F32"}


def test_missing_arrays_are_named_before_anything_is_read(tmp_path):
    tensors = random_tensors(LLAMA)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_orbax(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        models.load(tmp_path, backend=Backend())


def test_an_array_whose_file_is_gone_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)  # a folder for each array
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "orbax", random_tensors(LLAMA))
    assert models.load(tmp_path, backend=Backend()).weight_bytes > 0
    (tmp_path / "orbax" / "model.norm.weight" / "0").unlink()
    with pytest.raises(ValueError, match=r"array model\.norm\.weight cannot be read"):
        models.load(tmp_path, backend=Backend())


def test_a_database_whose_data_is_gone_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_orbax(tmp_path, random_tensors(LLAMA))
    for data in (tmp_path / "orbax" / "d").iterdir():
        data.unlink()
    with pytest.raises(ValueError, match="files are missing"):
        models.load(tmp_path, backend=Backend())


def test_nested_trees_are_named_by_their_path(tmp_path):
    tensors = random_tensors(LLAMA)
    nested = {"model": {}, "lm_head.weight": tensors["lm_head.weight"]}
    for name, array in tensors.items():
        if name.startswith("model."):
            nested["model"][name.removeprefix("model.")] = array
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_orbax(tmp_path, nested)
    loaded = models.load(pathlib.Path(tmp_path), backend=Backend())
    np.testing.assert_array_equal(loaded.params["final_norm"], tensors["model.norm.weight"])


def test_a_folder_that_is_no_checkpoint_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "orbax").mkdir()
    with pytest.raises(ValueError, match="Orbax"):
        models.load(tmp_path, backend=Backend())

"""models.load: from a source on disk to parameters on the device, with all that goes with them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxserve.models import families, sources
from jaxserve.models.config import Backend, ConfigKeys, ModelConfig, text_config
from jaxserve.models.loaders import end_tokens
from jaxserve.models.loaders.fill import Progress, fill, match, split_fused
from jaxserve.models.loaders.gguf_config import gguf_config
from jaxserve.models.loaders.gguf_file import read_gguf
from jaxserve.models.loaders.safetensors_file import read_folder, read_json
from jaxserve.models.spec import Path
from jaxserve.pallas_kernels.linear import api as linear_op

WEIGHT_DTYPES = ("auto", "float32", "bfloat16", "int8")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint opened and understood, its tensors not yet read."""

    path: pathlib.Path
    family: types.ModuleType
    config: ModelConfig
    tensors: Mapping[str, Any]
    names: Mapping[str, str]  # parameter -> tensor
    fused: Mapping[str, tuple[str, ...]]  # tensor -> the parameters it holds
    eos_ids: frozenset[int]
    is_gguf: bool


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. path: the folder or .gguf file, where the tokenizer is too."""

    family: types.ModuleType
    config: ModelConfig
    params: dict[str, Any]
    path: pathlib.Path
    name: str  # that clients use
    eos_ids: frozenset[int]
    weight_dtype: str  # what the matrices became
    weight_bytes: int
    fingerprint: str  # of config and weights: equal for equal models


def load(
    source: str | pathlib.Path,
    *,
    weight_dtype: str = "auto",
    dtype: str = "auto",
    backend: Backend,
    progress: Progress | None = None,
    mesh: jax.sharding.Mesh | None = None,
    cache_dir: pathlib.Path | None = None,
) -> LoadedModel:
    """Loads demo, a .gguf file, a folder or a hub id. Raises ValueError with the remedy.

    dtype: of activations; config.dtype is then what "auto" stands for, or bfloat16 for "int8",
    which sets config.backend.int8_inputs. progress(what, done bytes, total bytes) is called as a
    download or the tensors go by. mesh: put the parameters on its "model" axis.
    """
    if weight_dtype not in WEIGHT_DTYPES:
        raise ValueError(f"weight_dtype={weight_dtype!r}: use one of {', '.join(WEIGHT_DTYPES)}")
    path = sources.resolve(source, cache_dir=cache_dir, progress=progress)
    checkpoint = open_checkpoint(path)
    if dtype == "auto":
        dtype = activation_dtype(weight_dtype, backend)
    elif dtype == "int8":
        if backend.linear != "cpu":
            raise ValueError("dtype=int8 is for the CPU's native matmul, not here: use bfloat16")
        dtype, backend = "bfloat16", dataclasses.replace(backend, int8_inputs=True)
    config = dataclasses.replace(checkpoint.config, backend=backend, dtype=dtype)
    specs = checkpoint.family.param_specs(config)
    tensors = split_fused(specs, checkpoint.names, checkpoint.fused, checkpoint.tensors)
    try:
        found = match(specs, checkpoint.names, tensors, config.tied)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    params, forms = fill(
        specs,
        found,
        config,
        weight_dtype=weight_dtype,
        adjust=_adjustment(checkpoint),
        mesh=mesh,
        progress=progress,
    )
    return LoadedModel(
        family=checkpoint.family,
        config=config,
        params=params,
        path=path,
        name=sources.served_name(source, path),
        eos_ids=checkpoint.eos_ids,
        weight_dtype=_describe(forms, found),
        weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        fingerprint=_fingerprint(checkpoint),
    )


def open_checkpoint(path: pathlib.Path) -> Checkpoint:
    """Reads headers and config of a .gguf file or a folder; ValueError for what is unsupported."""
    if path.is_file():
        return _open_gguf(path)
    raw = read_json(path / "config.json")
    try:
        family, config = read_config(raw)
        eos_ids = end_tokens.folder_eos_ids(path, raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    tensors = _text_tensors(_read_tensors(path))
    fused = getattr(family, "HF_FUSED", {})
    return Checkpoint(path, family, config, tensors, family.HF_NAMES, fused, eos_ids, is_gguf=False)


def _read_tensors(folder: pathlib.Path) -> Mapping[str, Any]:
    if not (folder / "orbax").is_dir():
        return read_folder(folder)
    from jaxserve.models.loaders.orbax_folder import read_orbax  # orbax takes a second to import

    return read_orbax(folder)


def read_config(raw: Mapping[str, Any]) -> tuple[types.ModuleType, ModelConfig]:
    """The family and config that a config.json describes. ValueError names what is unsupported."""
    decoder = text_config(raw)
    family = families.find(decoder.get("model_type"))
    keys = ConfigKeys(decoder)
    config = family.read_config(keys)
    keys.finish()
    return family, config


def _open_gguf(path: pathlib.Path) -> Checkpoint:
    gguf = read_gguf(path)
    try:
        family = families.find_gguf(gguf.metadata.get("general.architecture"))
        model_type = family.__name__.rpartition(".")[2]
        _, config = read_config(gguf_config(gguf, model_type))
        eos_ids = end_tokens.gguf_eos_ids(gguf.metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    names, fused = family.GGUF_NAMES, getattr(family, "GGUF_FUSED", {})
    return Checkpoint(path, family, config, gguf.tensors, names, fused, eos_ids, is_gguf=True)


def _text_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Multimodal checkpoints put language_model in or before the decoder's names, and the image
    tower beside it; text-only ones have plain names already."""
    if not any("language_model." in name for name in tensors):
        return dict(tensors)
    towers = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.")
    towers = (*towers, "model.multi_modal_projector.")
    return {
        name.replace("model.language_model.", "model.", 1)
        if name.startswith("model.")
        else name.removeprefix("language_model."): tensor
        for name, tensor in tensors.items()
        if not name.startswith(towers)
    }


def _adjustment(checkpoint: Checkpoint):
    """What the file format did to parameters, undone: permuted rows, norm weights less one."""
    family, config = checkpoint.family, checkpoint.config
    permuted = checkpoint.is_gguf and family.GGUF_PERMUTED
    offset = np.float32(0.0 if checkpoint.is_gguf else family.NORM_OFFSET)
    heads = {"q": config.num_heads, "k": config.num_kv_heads}

    def adjust(path: Path, weight: Any) -> Any:
        name = path[0]
        if permuted and (count := heads.get(name.removesuffix("_bias"))):
            order = halves_from_pairs(count, config.head_dim)
            return weight[order] if name.endswith("_bias") else linear_op.take_rows(weight, order)
        if offset and name.endswith("norm"):
            return np.asarray(weight, np.float32) + offset
        return weight

    return adjust


def halves_from_pairs(num_heads: int, head_dim: int) -> np.ndarray:
    """Row order that undoes GGUF's llama layout, where the two rows of a rotated pair are
    neighbours: row i of a half comes from row 2 i, its partner from 2 i + 1."""
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def activation_dtype(weight_dtype: str, backend: Backend) -> str:
    """What "auto" means: bfloat16 where the hardware is made for it and weights are no wider."""
    accelerator = backend.attention in ("tpu", "gpu")
    return "bfloat16" if accelerator and weight_dtype in ("auto", "bfloat16") else "float32"


def _describe(forms: set[str], found: Mapping[Path, Any]) -> str:
    """The matrices' form in a word; for "stored" the file's own types."""
    if forms != {"stored"}:
        return "+".join(sorted(forms))
    return "+".join(
        sorted({tensor.type_name for tensor in found.values() if len(tensor.shape) > 1})
    )


def _fingerprint(checkpoint: Checkpoint) -> str:
    """sha256 over the config and a sample of every tensor: cheap, and different for any two
    checkpoints that training or quantising made different."""
    digest = hashlib.sha256(repr(checkpoint.config).encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(json.dumps([name, tensor.shape, tensor.type_name]).encode())
        digest.update(tensor.sample())
    return digest.hexdigest()

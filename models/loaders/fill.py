"""From named tensors to a family's parameters: every one filled once, every tensor used once.

`match` compares the whole checkpoint with what the family declares before a byte of data is read,
and reports all differences in one error. `fill` then goes parameter by parameter, so at most one
parameter exists twice at any time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxserve.models import spec as spec_tree
from jaxserve.models.config import Backend, ModelConfig
from jaxserve.models.loaders.gguf_file import GgufTensor
from jaxserve.models.sharding import partition, placement
from jaxserve.models.spec import ParamSpec, Path
from jaxserve.pallas_kernels.linear import api as linear_op

log = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]  # (tensor, bytes done, bytes in all)

# Buffers that some exporters save beside the weights; they follow from the config.
BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|rope_freqs\.weight")
FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
MAX_REPORTED = 40


def split_fused(
    specs: Mapping[str, Any],
    names: Mapping[str, str],
    fused: Mapping[str, tuple[str, ...]],
    tensors: Mapping[str, Any],
) -> dict[str, Any]:
    """Tensors that hold several parameters, one below the other, cut into one for each.

    fused: tensor name -> its parameters in order. A tensor of another height stays whole, for
    `match` to report.
    """
    found = dict(tensors)
    for index, layer in enumerate(specs["layers"]):
        for template, parts in fused.items():
            tensor = tensors.get(template.format(index))
            heights = [layer[part].shape[0] for part in parts]
            if tensor is None or tensor.shape[:1] != (sum(heights),):
                continue
            del found[template.format(index)]
            start = 0
            for part, height in zip(parts, heights):
                found[names[part].format(index)] = tensor.rows(start, start + height)
                start += height
    return found


def match(
    specs: Mapping[str, Any], names: Mapping[str, str], tensors: Mapping[str, Any], tied: bool
) -> dict[Path, Any]:
    """Which tensor fills which parameter, or one ValueError with every mismatch.

    names: parameter -> tensor name, {} standing for the layer. A tied model's own output head is
    left aside: the config decides that the embedding is the head, with a warning if they differ.
    """
    wanted = {path: (names[path[0]].format(path[1]), spec) for path, spec in spec_tree.walk(specs)}
    used = {name for name, _ in wanted.values()}
    ignored = {name for name in tensors if BUFFERS.fullmatch(name)}
    if tied and (head := names["lm_head"]) in tensors and head not in used:
        ignored.add(head)
        _warn_of_other_head(tensors[head], tensors.get(names["embed"]))
    faults = [
        f"missing: {name} {spec.shape}" for name, spec in wanted.values() if name not in tensors
    ]
    faults += [
        f"unexpected: {name} {tensors[name].shape}"
        for name in sorted(tensors.keys() - used - ignored)
    ]
    for name, spec in wanted.values():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tensor.shape != spec.shape:
            faults.append(f"misshaped: {name} is {tensor.shape}, the model has {spec.shape}")
        if not isinstance(tensor, GgufTensor) and tensor.type_name not in FLOATS:
            faults.append(f"not floating point: {name} is {tensor.type_name}")
    if faults:
        raise ValueError(_report(faults, not tied and names["lm_head"] not in tensors))
    return {path: tensors[name] for path, (name, _) in wanted.items()}


def _report(faults: list[str], lacks_head: bool) -> str:
    shown = faults[:MAX_REPORTED]
    if len(faults) > len(shown):
        shown.append(f"... and {len(faults) - len(shown)} more")
    if lacks_head:
        shown.append("(no output head: a model that ties it says tie_word_embeddings=true)")
    return f"{len(faults)} tensors do not match the config:\n  " + "\n  ".join(shown)


def _warn_of_other_head(head: Any, embedding: Any) -> None:
    same = (
        embedding is not None
        and head.type_name == embedding.type_name
        and np.array_equal(_bytes(head), _bytes(embedding))
    )
    if not same:
        log.warning(
            "%s differs from the embedding, but the config ties them: the embedding is used",
            head.name,
        )


def _bytes(tensor: Any) -> np.ndarray:
    """A tensor's bytes as stored, so that NaN equals itself."""
    data = tensor.data if isinstance(tensor, GgufTensor) else tensor.array()
    return data.reshape(-1).view(np.uint8)


def fill(
    specs: Mapping[str, Any],
    sources: Mapping[Path, Any],
    config: ModelConfig,
    *,
    weight_dtype: str,
    adjust: Callable[[Path, Any], Any] = lambda path, weight: weight,
    mesh: jax.sharding.Mesh | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], set[str]]:
    """-> (parameters on the device, the forms that matrices took).

    adjust(path, weight) undoes what a file format does to a parameter (permuted rows, norms less
    one). Matrices become what the linear op reads fastest as weight_dtype; the rest is float32.
    """
    total, done, forms = sum(tensor.nbytes for tensor in sources.values()), 0, set()

    def read(path: Path) -> Any:
        nonlocal done
        tensor = sources[path]
        weight = adjust(path, source_weight(tensor))
        done += tensor.nbytes
        if progress is not None:
            progress(tensor.name, done, total)
        return weight

    def finish(weight: Any, spec: ParamSpec, stacked: bool) -> Any:
        if spec.matrix:
            form = choose_form(weight, weight_dtype, config.backend)
            forms.add(form)
            weight = linear_op.prepare(
                weight, form, config.backend.linear, int8_inputs=config.backend.int8_inputs
            )
        else:
            weight = np.asarray(weight, np.float32)
        return to_device(weight, spec, mesh, stacked)

    if not config.backend.stacked:
        return spec_tree.assemble(specs, lambda path, spec: finish(read(path), spec, False)), forms
    params = {
        name: finish(read((name, None)), spec, False)
        for name, spec in specs.items()
        if name != "layers"
    }
    params["layers"] = {
        name: finish(_stack([read((name, i)) for i in range(config.num_layers)], spec), spec, True)
        for name, spec in specs["layers"][0].items()
    }
    return params, forms


def _stack(weights: list[Any], spec: ParamSpec) -> Any:
    return linear_op.stack(weights) if spec.matrix else np.stack(weights)


def source_weight(tensor: Any) -> Any:
    """A tensor as the linear op takes it: floats, or the file's own quantised groups."""
    if isinstance(tensor, GgufTensor) and tensor.quantised:
        if len(tensor.shape) < 2:
            return tensor.float32()
        return linear_op.from_gguf_blocks(tensor.data, tensor.type_name)
    array = tensor.array()
    kept = (np.float32, np.float16, jax.numpy.bfloat16)
    return array if array.dtype in kept else array.astype(np.float32)


def choose_form(weight: Any, weight_dtype: str, backend: Backend) -> str:
    """What "auto" means for one matrix: bfloat16 on accelerators, else as the linear op says."""
    if weight_dtype != "auto":
        return weight_dtype
    if backend.attention in ("tpu", "gpu"):
        return "bfloat16"
    return linear_op.auto_weight_dtype(backend.linear, weight)


def to_device(weight: Any, spec: ParamSpec, mesh: jax.sharding.Mesh | None, stacked: bool) -> Any:
    """numpy leaves onto the device or mesh; views of files are copied, for files can change."""
    own = lambda leaf: leaf if leaf.flags.writeable else np.array(leaf)
    weight = jax.tree.map(own, weight)
    if mesh is None:
        if not (spec.by_row and isinstance(weight, np.ndarray)):
            return jax.device_put(weight)
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.device_put(weight, placement(spec, device))
    if not isinstance(weight, np.ndarray):
        raise ValueError("weights on several devices must be float32 or bfloat16: --weight_dtype")
    return jax.device_put(weight, placement(spec, partition(spec, mesh, stacked=stacked)))

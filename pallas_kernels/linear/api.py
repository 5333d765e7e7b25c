"""linear: y_TF = x_TD @ w_FD^T for plain, packed and group-quantised weights. The only door.

    from jaxserve.pallas_kernels.linear import api as linear_op
    w = linear_op.prepare(array_FD, "float32", backend)          # once, at load (numpy in and out)
    y_TF = linear_op.linear(x_TD, w, backend=backend)            # in the step

Weights may have a leading layer axis L; then `layer` (a Python int or a traced int32 scalar) picks
one matrix, and the native backend reads it in place: under lax.scan no weight is ever copied.

Backends: "cpu", native code that uses every core this process may run on, and "reference", plain
jnp for any device. The cpu backend promises that a row of y depends on that row of x alone, bit for
bit, and not on the other rows; nor on their number, but for one exception: on a processor with AMX
quantised weights meet three rows of float32 or more on its tile unit. Accuracy, relative to the
largest element of a row of y: some 1e-7 (products and sums in float32, or integers of 24 bits), on
the tile unit 1e-6 in the mean and 2e-5 at most (16 bits of weights and activations, sums in
float32). Where the processor multiplies bfloat16, so is x that comes in it, about twice as fast:
on the tile unit by weights rounded to bfloat16, good to 8 bits, by AVX-512 by codes as they are, as
good as float32. There bits never depend on the number of rows.
"""

import jax
import jax.numpy as jnp
import numpy as np

from . import cpu, reference, weights
from .gguf_blocks import from_gguf_blocks
from .reference import activate
from .weights import PackedWeight, QuantizedWeight, concatenate, quantize, stack, take_rows

__all__ = [
    "PackedWeight",
    "QuantizedWeight",
    "activate",
    "auto_weight_dtype",
    "choose_backend",
    "concatenate",
    "dequantize",
    "from_gguf_blocks",
    "gated",
    "gather_rows",
    "linear",
    "linears",
    "prepare",
    "quantize",
    "stack",
    "take_rows",
]

WEIGHT_DTYPES = ("stored", "float32", "bfloat16", "int8", "int4")


def choose_backend(platform: str) -> str:
    """ "cpu" where the native library is built and XLA runs on the CPU, else "reference"."""
    return "cpu" if platform == "cpu" and cpu.available() else "reference"


def auto_weight_dtype(backend: str, source) -> str:
    """The fastest form that keeps float32's tokens, for `source`: an array or QuantizedWeight.

    "stored" keeps a checkpoint's own groups, or its bfloat16: half to an eighth of float32's bytes
    and the same values. Without native code quantised weights would be expanded at every call, so
    there it is "float32".
    """
    if backend == "cpu":
        compact = isinstance(source, QuantizedWeight) or source.dtype == jnp.bfloat16
        return "stored" if compact else "float32"
    return "float32"


def prepare(source, weight_dtype: str, backend: str, *, int8_inputs: bool = False):
    """The form of `source` (numpy [F, D] or [L, F, D], or a QuantizedWeight) that `linear` reads
    fastest on `backend`. numpy in, numpy leaves out: put the result on the device with device_put.

    weight_dtype: "stored" (as it comes: its groups, bfloat16, else float32), "float32", "bfloat16",
    "int8" or "int4" (rounded to groups of 32). An input size that groups of 32 do not divide stays
    float32 under "int8" and "int4".
    int8_inputs: where that is faster, a quantised weight meets x rounded to 8 bits, in steps of a
    power of two for each 32 inputs, and has zero points in place of offsets. On a processor with
    AMX it is not: there this changes nothing.
    """
    if weight_dtype not in WEIGHT_DTYPES:
        raise ValueError(f"weight_dtype {weight_dtype!r}: use one of {', '.join(WEIGHT_DTYPES)}")
    weight = _convert(source, weight_dtype)
    if backend != "cpu":
        return weight
    if isinstance(weight, QuantizedWeight):
        if int8_inputs and cpu.faster_with_int8_inputs():
            weight = weights.for_int8_inputs(weight)
        return weights.to_panels(weight)
    return weights.pack_floats(weight)


def _convert(source, weight_dtype):
    quantised = isinstance(source, QuantizedWeight)
    if weight_dtype == "stored":
        if quantised or source.dtype == jnp.bfloat16:
            return source
        weight_dtype = "float32"
    if weight_dtype in ("int8", "int4"):
        if quantised and source.bits == (8 if weight_dtype == "int8" else 4):
            return source
        if source.shape[-1] % weights.GROUP == 0:
            return quantize(weights.to_floats(source), weight_dtype)
        weight_dtype = "float32"
    dtype = np.float32 if weight_dtype == "float32" else jnp.bfloat16
    floats = weights.to_floats(source) if quantised else np.asarray(source)
    return floats.astype(dtype)


def dequantize(weight):
    """The float32 matrix [F, D] (or [L, F, D]) that any form of weight stands for."""
    return weights.to_floats(weight)


def gather_rows(weight, ids_T):
    """float32 [T, D]: rows `ids_T` (int32, in range: check on the host) of a weight without layer
    axis, in any form; an embedding look-up that shares its table with the output head."""
    return weights.pick_rows(weight, ids_T)


def linear(x_TD, weight, *, plus=None, dtype=None, layer=None, backend: str):
    """y_TF = plus + x_TD @ weight^T in `dtype`, or x's; weight: as `prepare` returns it, or a plain
    array, which runs in XLA on any backend.

    plus: [T, F] in that dtype, or None: a residual, which native code adds while y is in registers.
    `layer` picks from a weight with a leading layer axis.
    """
    _check(x_TD, weight, layer)
    if _is_native(backend, weight):
        return cpu.linear(x_TD, weight, plus=plus, dtype=dtype, layer=layer)
    y_TF = reference.linear(x_TD, weight, layer=layer).astype(dtype or x_TD.dtype)
    return y_TF if plus is None else plus + y_TF


def linears(x_TD, weights, *, layer=None, backend: str) -> tuple:
    """`linear` of one x with several weights: native code makes x ready for it once."""
    if all(_is_native(backend, weight) for weight in weights):
        for weight in weights:
            _check(x_TD, weight, layer)
        return cpu.linears(x_TD, tuple(weights), layer=layer)
    return tuple(linear(x_TD, weight, layer=layer, backend=backend) for weight in weights)


def _check(x_TD, weight, layer) -> None:
    assert (len(weight.shape) == 3) == (layer is not None), (weight.shape, layer)
    assert x_TD.shape[-1] == weight.shape[-1], (x_TD.shape, weight.shape)


def _is_native(backend: str, weight) -> bool:
    return backend == "cpu" and not isinstance(weight, jax.Array | np.ndarray)


def gated(x_TD, gate, up, activation: str, *, layer=None, backend: str):
    """activation(x gate^T) * (x up^T) [T, F]: a gated unit. activation: "silu", "gelu",
    "gelu_tanh" or "relu"."""
    quantised = isinstance(gate, QuantizedWeight) and isinstance(up, QuantizedWeight)
    if backend == "cpu" and quantised and activation in cpu.ACTIVATIONS:
        return cpu.gated(x_TD, gate, up, activation, layer=layer)
    gate_TF, up_TF = linears(x_TD, (gate, up), layer=layer, backend=backend)
    return activate(gate_TF, activation) * up_TF

"""The native library: C++ operations for the CPU, built by setup.py where a compiler was at hand.

`load` finds the library beside this file, registers its functions with XLA and says why not if it
cannot; every caller has a reference to fall back on.
"""

import ctypes
import functools
import pathlib
import re
import sysconfig

import jax

# Each contains those before it; native.h's order.
ISAS = ("plain", "avx2", "avx512", "avx512vbmi", "avx512bf16", "amx")
TARGETS = (
    "jaxserve_best_token", "jaxserve_linear_floats", "jaxserve_linear_groups",
    "jaxserve_ragged_attention", "jaxserve_rms_norm", "jaxserve_rotate", "jaxserve_zeros",
)  # fmt: skip


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """(library, "") with its functions registered, or (None, why there is none)."""
    path = pathlib.Path(__file__).with_name("_native" + sysconfig.get_config_var("EXT_SUFFIX"))
    if not path.exists():
        return None, "no native library: jaxserve was installed without a C++ compiler"
    try:
        library = ctypes.CDLL(str(path))
        _check_version(library.jaxserve_ffi_major(), library.jaxserve_ffi_minor())
        for name in TARGETS:
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
    except Exception as error:  # another jax's ABI, a missing symbol, a broken file: all the same
        return None, f"native library not usable, reinstall jaxserve: {error}"
    return library, ""


def _check_version(major: int, minor: int) -> None:
    """Raises unless this jaxlib runs handlers of that version of XLA's FFI: the same major version,
    at most its minor one. Registering any other would keep jax from starting its CPU backend."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    found = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header, re.MULTILINE))
    if major != int(found["MAJOR"]) or minor > int(found["MINOR"]):
        raise ImportError(
            f"built for FFI {major}.{minor}, this jaxlib has {found['MAJOR']}.{found['MINOR']}"
        )


def available() -> bool:
    """Whether the native operations can run."""
    return load()[0] is not None


def isas() -> tuple[str, ...]:
    """The instruction sets this machine has, the best last; () without the library."""
    library, _ = load()
    return ISAS[: library.jaxserve_best_isa() + 1] if library else ()


def isa_code(isa: str | None) -> int:
    """A call's `isa` attribute: None for the best. ValueError for one this machine has not."""
    if isa is None:
        return -1
    if isa not in isas():
        raise ValueError(f"instruction set {isa!r}: this machine has {', '.join(isas())}")
    return ISAS.index(isa)


def zeros(shape: tuple[int, ...], dtype) -> jax.Array:
    """jnp.zeros in huge pages, where the system has them: for arrays read here and there."""
    assert available(), describe()
    return _zeros_program(tuple(shape), jax.numpy.dtype(dtype))()


@functools.cache
def _zeros_program(shape, dtype):
    return jax.jit(jax.ffi.ffi_call("jaxserve_zeros", jax.ShapeDtypeStruct(shape, dtype)))


def describe() -> str:
    """One line for start-up messages and bug reports."""
    library, why = load()
    if library is None:
        return why
    return f"native CPU operations: {isas()[-1]}, {library.jaxserve_num_threads()} threads"

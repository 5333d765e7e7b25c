"""Packaging. Tool settings live in pyproject.toml; dependencies and package layout live here.

`models/` and `pallas_kernels/` stand at the top level of the repository and install as
`jaxserve.models` and `jaxserve.pallas_kernels`: a package called `models` in site-packages would
collide with users' own.
"""

import glob
import importlib.util
import pathlib
import sys

import setuptools
from pybind11.setup_helpers import ParallelCompile

PACKAGE_DIR = {
    "jaxserve": "jaxserve",
    "jaxserve.models": "models",
    "jaxserve.pallas_kernels": "pallas_kernels",
    "jaxserve.configs": "configs",
}


def packages():
    """Every package below the four roots, by its installed name."""
    found = []
    for name, folder in PACKAGE_DIR.items():
        found.append(name)
        found += [f"{name}.{sub}" for sub in setuptools.find_namespace_packages(folder)]
    return sorted(p for p in set(found) if "__pycache__" not in p)


NATIVE_SOURCES = [
    "pallas_kernels/native.cc",
    "pallas_kernels/native_zeros.cc",
    "pallas_kernels/best_token/cpu.cc",
    "pallas_kernels/linear/cpu_floats.cc",
    "pallas_kernels/linear/cpu_groups.cc",
    "pallas_kernels/linear/cpu_groups_amx.cc",
    "pallas_kernels/linear/cpu_groups_bfloat16.cc",
    "pallas_kernels/linear/cpu_groups_long.cc",
    "pallas_kernels/linear/cpu_groups_avx512.cc",
    "pallas_kernels/ragged_paged_attention/cpu.cc",
    "pallas_kernels/ragged_paged_attention/cpu_codes.cc",
    "pallas_kernels/ragged_paged_attention/cpu_lanes.cc",
    "pallas_kernels/ragged_paged_attention/cpu_tiles.cc",
    "pallas_kernels/ragged_paged_attention/cpu_write.cc",
    "pallas_kernels/rms_norm/cpu.cc",
    "pallas_kernels/rotary/cpu.cc",
]


def native_extension():
    """[the native CPU operations], or [] without XLA's headers, which come with jaxlib.

    Optional: where it cannot be compiled the install goes on without it, and jaxserve runs on XLA
    alone. Processor features are chosen when it runs, so one build serves every x86-64.
    """
    jaxlib = importlib.util.find_spec("jaxlib")
    headers = pathlib.Path(jaxlib.origin).parent / "include" if jaxlib else None
    if headers is None or not (headers / "xla" / "ffi" / "api" / "ffi.h").exists():
        print("jaxserve: no jaxlib headers, so no native CPU operations", file=sys.stderr)
        return []
    return [
        setuptools.Extension(
            "jaxserve.pallas_kernels._native",
            sources=NATIVE_SOURCES,
            depends=glob.glob("pallas_kernels/**/*.h", recursive=True),
            language="c++",
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-ffp-contract=fast",  # multiply-adds are fused wherever the processor can
                "-Wno-psabi",
                "-Wno-maybe-uninitialized",  # GCC 12 suspects its own intrinsics
                "-Wno-uninitialized",
                f"-isystem{headers}",
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]


ParallelCompile().install()
setuptools.setup(
    name="jaxserve",
    version="0.1.0",
    description="Serves language models from JAX on TPU, GPU and CPU with continuous batching",
    python_requires=">=3.11",
    packages=packages(),
    package_dir=PACKAGE_DIR,
    package_data={"": ["*.json", "*.toml", "*.cc", "*.h", "*.html", "*.css", "*.js"]},
    ext_modules=native_extension(),
    # Lower bounds are versions the suite has passed with.
    install_requires=[
        "absl-py>=2.5",
        "fastapi>=0.165",
        "flax>=0.12.8",
        "gguf>=0.19",
        "httptools>=0.9",
        "jax>=0.10.2",
        "jinja2>=3.1.6",
        "llguidance>=1.9.1",
        "numpy>=2.4",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "orjson>=3.13",
        "prometheus-client>=0.26",
        "protobuf>=7",
        "rich>=15",
        "safetensors>=0.8",
        "sentencepiece>=0.2.3",
        "tokenizers>=0.23.3",
        "uvicorn>=0.54",
    ],
    extras_require={
        "tpu": ["jax[tpu]>=0.10.2"],
        "cuda": ["jax[cuda13]>=0.10.2", "nvidia-ml-py>=13"],  # the latter reads a GPU's energy
        "cuda-deviceless": [
            "jax-cuda13-plugin>=0.10.2",
            "jax-cuda13-pjrt>=0.10.2",
            "nvidia-cuda-nvcc>=13",
            "nvidia-cuda-nvdisasm>=13",
            "nvidia-nvvm>=13",
        ],
        "hub": ["huggingface_hub>=0.30"],
        "lm-eval": ["lm_eval[api]>=0.4.13"],  # half a gigabyte, for one test
        "otel": ["opentelemetry-exporter-otlp-proto-http>=1.45", "opentelemetry-sdk>=1.45"],
        "plots": ["matplotlib>=3.11"],
        "test": [
            "anthropic>=2.14",
            "httpx>=0.28",
            "hypothesis>=6.170",
            "matplotlib>=3.11",
            "openai>=3.57",
            "opentelemetry-sdk>=1.45",
            "pytest>=9.2",
            "pytest-xdist>=3.8",
            "ruff>=0.17",
            "schemathesis>=4.32",
        ],
    },
    entry_points={"console_scripts": ["jaxserve=jaxserve.main:run"]},
)

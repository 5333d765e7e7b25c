"""Compiles attention, or a whole engine step, for a chip that is not here.

    python tools/deviceless.py compile --topology=v6e:2x2 --op=ragged_paged_attention
    python tools/deviceless.py compile --topology=h200 --shape=smollm2 --kv_dtype=int8
    python tools/deviceless.py compile --topology=v5e:2x2 --step --config=llama-3.1-8b-v6e

Prints what the program takes in memory and the loops of the kernels' final code: for TPUs by the
schedule, for GPUs (--kernel=mosaic) by the machine code.
Needs `pip install -e ".[tpu]"` for TPUs, `pip install -e ".[cuda-deviceless]"` for GPUs; no
driver and no chip. Topologies: v5e:2x2, v6e:2x2, tpu7x:2x2x1 (7x), h200.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re
import sys
import tempfile
import time
import tomllib

import machine_code
import parameter_reads
import schedule

ALIASES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1", "tpu7x": "tpu7x:2x2x1"}
SHORT_LOOP = 30  # bundles; shorter ones are waits
CACHE_BYTES = 4 * 2**30
TOOLS = pathlib.Path(__file__).resolve().parent
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block_optin: 232448 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560
  clock_rate_ghz: 1.98 device_memory_size: 150000000000 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H200"
"""


class Missing(Exception):
    """Something to install or to choose differently; the message is all a user needs."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A described chip: where arguments would live, and how to compile for it."""

    backend: str  # of the attention op
    sharding: object
    context: object  # makes the abstract mesh to lower under: kernels ask it for the chip
    options: dict

    def spec(self, tree):
        """ShapeDtypeStructs -> the same on the target; one that has a place keeps it."""
        import jax

        place = lambda x: x if x.sharding else x.update(sharding=self.sharding)
        return jax.tree.map(place, tree)

    @property
    def device_kind(self) -> str:
        (device,) = self.sharding.device_set
        return device.device_kind

    def compile(self, function, *arguments, donate, options=None):
        import jax

        with self.context():
            lowered = jax.jit(function, donate_argnums=donate).lower(*map(self.spec, arguments))
            try:
                return lowered.compile(compiler_options=self.options | (options or {}))
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                reason = str(error).splitlines()[0]
                raise Missing(f"{reason} Try --num_pages, or fewer --layers.") from error


def prepare(schedules=None) -> None:
    """Sets the environment, before jax is imported; schedules: a folder for the compiler's."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip that two would share
    if schedules is not None:
        os.environ["LIBTPU_INIT_ARGS"] = schedule.dump_flags(schedules)
        if machine_code.disassembler_found():
            os.environ["MOSAIC_GPU_DUMP_TO"] = schedules


def describe(topology: str) -> Target:
    """The target of a topology name. Raises Missing where its compiler is not installed."""
    topology = ALIASES.get(topology, topology)
    gpu = topology in ("h200", "cuda")
    package, extra = ("jax_cuda13_plugin", "cuda-deviceless") if gpu else ("libtpu", "tpu")
    if importlib.util.find_spec(package) is None:
        raise Missing(f'{package} is not installed: pip install -e ".[{extra}]"')
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    if gpu:
        from jax._src import xla_bridge

        xla_bridge.backends()  # registers the CUDA compiler, GPU or no GPU
        find = functools.partial(
            topologies.get_topology_desc,
            platform="cuda", topology_name="", topology="1 x 1 x 1", target_config=H200,
        )  # fmt: skip
    else:
        find = functools.partial(
            topologies.get_topology_desc, platform="tpu", topology_name=topology
        )
    try:
        devices = find().devices
    except Exception as error:  # the plugins raise several kinds, with the reason in the text
        raise Missing(f"{topology}: {str(error).splitlines()[0]}") from error
    axis = dict(axis_names=("model",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(Mesh(np.array(devices[:1]), **axis), P())
    backend = "gpu" if gpu else "tpu"
    chip = AbstractDevice(device_kind=devices[0].device_kind, num_cores=1, platform=backend)
    mesh = AbstractMesh((1,), abstract_device=chip, **axis)
    options = {"xla_gpu_autotune_level": 0} if gpu else {}
    return Target(backend, sharding, lambda: jax.sharding.use_abstract_mesh(mesh), options)


def compile_attention(target: Target, args):
    """-> (compiled, bytes of the cache, bytes of one layer of it)."""
    import jax
    import jax.numpy as jnp

    from jaxserve.pallas_kernels.ragged_paged_attention import api, gpu

    attend = functools.partial(api.ragged_paged_attention, backend=target.backend)
    if args.kernel is not None:
        if target.backend != "gpu":
            raise Missing("--kernel is for --topology=h200")
        attend = functools.partial(gpu.ragged_paged_attention, kernel=args.kernel)
    shape = head_shape(args.shape)
    print(f"\n{shape.name}")
    dtype = jnp.dtype(args.dtype)
    spec = api.KVSpec(4, shape.J, shape.E, args.page_size, args.kv_dtype or args.dtype)
    num_pages = args.num_pages or CACHE_BYTES // api.kv_bytes_per_page(spec, target.backend)
    rows, T, pages = args.rows, args.tokens, -(-args.max_len // args.page_size)
    array = lambda dims, dtype=jnp.int32: jax.ShapeDtypeStruct(dims, dtype)
    batch = api.RaggedBatch(
        array((rows, pages)), array((rows,)), array((rows + 1,)), array((1,)), array((1,))
    )
    sinks = array((shape.H,), jnp.float32) if shape.sinks else None

    def step(q, k, v, kv_pages, batch, layer, sinks):
        return attend(
            q, k, v, kv_pages, batch,
            layer=layer, scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap,
            sinks=sinks,
        )  # fmt: skip

    compiled = target.compile(
        step,
        array((T, shape.H, shape.E), dtype),
        array((T, shape.J, shape.E), dtype),
        array((T, shape.J, shape.E), dtype),
        api.kv_page_specs(spec, num_pages, target.backend),
        batch,
        array(()),
        sinks,
        donate=3,
    )
    cache = num_pages * api.kv_bytes_per_page(spec, target.backend)
    return compiled, cache, cache // spec.num_layers


def head_shape(text: str):
    """A shape of shapes.py by its name, or a plain one from "query heads/KV heads/head size"."""
    from jaxserve.pallas_kernels.ragged_paged_attention import shapes

    known = {shape.name: shape for shape in shapes.SHAPES}
    if re.fullmatch(r"[1-9]\d*/[1-9]\d*/[1-9]\d*", text):
        return shapes.HeadShape(text, *map(int, text.split("/")))
    if text not in known:
        raise Missing(f"--shape={text}: choose one of {', '.join(known)}, all, or as 32/8/128")
    return known[text]


def compile_step(target: Target, args):
    """The same for one bucket of an engine step of a preset's model, without its weights."""
    import jax
    import jax.numpy as jnp

    from jaxserve.engine.runner import RunnerShape, bucket_step, compiler_options
    from jaxserve.engine.state import init_state
    from jaxserve.engine.step import StepSpec
    from jaxserve.models.config import Backend
    from jaxserve.models.loaders.checkpoint import read_config
    from jaxserve.models.loaders.random_weights import abstract_params
    from jaxserve.pallas_kernels.ragged_paged_attention import api

    preset = _preset(args.config)
    family, config = read_config(_model_config(preset["model"]))
    backend = Backend(target.backend, "reference", stacked=target.backend == "tpu")
    config = dataclasses.replace(config, backend=backend, dtype="bfloat16")
    if args.layers is not None:
        layers = config.layers[: args.layers]
        config = dataclasses.replace(config, layers=layers, num_layers=len(layers))
    kv_spec = config.kv_spec(args.page_size, args.kv_dtype or jnp.bfloat16)
    page_bytes = api.kv_bytes_per_page(kv_spec, target.backend)
    shape = RunnerShape(
        num_slots=preset.get("num_slots", 16),
        token_budget=preset.get("token_budget", 256),
        max_model_len=preset.get("max_model_len", 8192),
        num_pages=args.num_pages or CACHE_BYTES // page_bytes,
        kv_spec=kv_spec,
    )
    pages = api.kv_page_specs(shape.kv_spec, shape.num_pages, target.backend)
    state = jax.eval_shape(
        lambda pages: init_state(
            pages, shape.num_slots, shape.max_model_len, config.vocab_size, config.hidden_size
        ),
        pages,
    )
    spec = StepSpec(family, config, target.backend, config.vocab_size)
    step = bucket_step(spec, shape, min(args.tokens, shape.token_budget), args.sampled)
    params = abstract_params(
        family.param_specs(config), stacked=backend.stacked, mesh=target.sharding.mesh
    )
    options = compiler_options(target.device_kind)
    compiled = target.compile(step.run, params, state, *step.inputs, donate=1, options=options)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    print(f"weights                {weights / 1e6:12,.1f} MB")
    report_reads(compiled)
    cache = shape.num_pages * page_bytes
    return compiled, cache, cache // config.num_layers


def _preset(name):
    folder = TOOLS.parent / "configs"
    file = folder / f"{name}.toml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.toml")))
        raise Missing(f"--config={name}: choose one of {known}")
    return tomllib.loads(file.read_text())


def _model_config(model):
    """config.json of a preset's model: from its folder, or from the few that are kept here."""
    folder = pathlib.Path(model).expanduser()
    if (folder / "config.json").is_file():
        return json.loads((folder / "config.json").read_text())
    kept = json.loads((TOOLS / "model_configs.json").read_text())
    if model not in kept:
        raise Missing(f"{model}: no config.json; known by name: {', '.join(kept)}")
    return kept[model]


def report(compiled, cache, layer, seconds):
    memory = compiled.memory_analysis()
    show = lambda label, count: print(f"{label:22s} {count / 1e6:12,.1f} MB")
    print(f"compiled in            {seconds:12.1f} s")
    show("KV cache", cache)
    show("one layer of it", layer)
    show("aliased in place", memory.alias_size_in_bytes)
    show("temporary", memory.temp_size_in_bytes)
    show("arguments", memory.argument_size_in_bytes)
    show("outputs", memory.output_size_in_bytes)
    in_place = memory.alias_size_in_bytes >= cache and memory.temp_size_in_bytes < layer
    print(f"cache updated in place {'yes' if in_place else 'NO'!s:>12s}")


def report_reads(compiled):
    """Says how often the step reads each parameter that is 1 % of them or more."""
    reads = parameter_reads.parameter_reads(compiled.as_text())
    total = sum(size for _, size in reads.values())
    more = {
        name: read / size
        for name, (read, size) in reads.items()
        if 100 * size >= total and read > 1.01 * size
    }
    print(f"every weight read once {'NO' if more else 'yes':>12s}")
    for name, times in more.items():
        print(f"  {name} is read {times:.2f} times")


def report_loops(folder):
    """Prints the loops of the kernels that the compilers wrote into the folder, and empties it."""
    for name, loops in schedule.kernels(folder, "ragged_paged_attention").items():
        print(f"\n{name}: loops of the final schedule (bundles ~ cycles)")
        for loop in (loop for loop in loops if loop.bundles >= SHORT_LOOP):
            ops = "  ".join(f"{unit} {count}" for unit, count in loop.ops.items())
            print(f"{'  ' * loop.depth}{loop.bundles:6d} bundles  {ops}")
    for name, loops in machine_code.kernels(folder, "ragged_paged_attention").items():
        print(f"\n{name}: loops of the machine code, and the shortest way through them")
        for loop in loops:
            ops = "  ".join(f"{unit} {count}" for unit, count in loop.ops.items())
            shortest = f"{loop.shortest:5d} of {loop.instructions} instructions"
            print(f"{shortest} in {loop.cycles} cycles  {ops}")
    for file in pathlib.Path(folder).iterdir():
        file.unlink()


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("verb", choices=["compile"])
    parser.add_argument("--topology", default="v6e:2x2", help="v5e, v6e, 7x, h200, or a full name")
    parser.add_argument(
        "--op", default="ragged_paged_attention", choices=["ragged_paged_attention"]
    )
    parser.add_argument("--step", action="store_true", help="compile an engine step instead")
    parser.add_argument("--sampled", action="store_true", help="the step that stops at the logits")
    parser.add_argument("--config", default="llama-3.1-8b-v6e", help="preset of the step")
    parser.add_argument("--layers", type=int, default=None, help="of the step; default: all")
    parser.add_argument(
        "--shape", default="llama-3-8b", help="a name of shapes.py, all, or heads as 32/8/128"
    )
    parser.add_argument(
        "--kernel", choices=["triton", "mosaic"], help="on h200; default: the one jaxserve uses"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv_dtype", default=None, help="default: as --dtype")
    parser.add_argument("--page_size", type=int, default=16)
    parser.add_argument("--num_pages", type=int, default=None, help="default: 4 GiB of cache")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="packed tokens of the step")
    parser.add_argument("--max_len", type=int, default=8192, help="longest row")
    parser.add_argument("--no_loops", action="store_true", help="print no loops: compiles sooner")
    return parser.parse_args(argv)


def parts(args):
    """args for each thing to compile: one, or with --shape=all each of shapes.py."""
    if args.step or args.shape != "all":
        return [args]
    from jaxserve.pallas_kernels.ragged_paged_attention import shapes

    one = lambda name: argparse.Namespace(**{**vars(args), "shape": name})
    return [one(shape.name) for shape in shapes.SHAPES]


def main(argv=None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        # The schedules' texts take longer to write than a step, or a large kernel, to compile.
        prepare(None if args.step or args.no_loops else folder)
        try:
            target = describe(args.topology)
            for part in parts(args):
                began = time.monotonic()
                work = compile_step if args.step else compile_attention
                compiled, cache, layer = work(target, part)
                report(compiled, cache, layer, time.monotonic() - began)
                report_loops(folder)
        except (Missing, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

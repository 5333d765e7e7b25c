"""Cost of ragged paged attention: measured on the device at hand, or read from a TPU's schedule.

    python tools/bench_attention.py                          time here: batches x shapes
    python tools/bench_attention.py --topology=v6e           bundles per KV token, no TPU needed
    python tools/bench_attention.py --topology=v5e --shapes=smollm2,gpt-oss-20b --page_sizes=16
    python tools/bench_attention.py --topology=7x --tune     choose block sizes, keep them as data
    python tools/bench_attention.py --topology=7x --recount  count anew in the sizes that are kept
    python tools/bench_attention.py --table                  what is kept, beside other kernels

The second form compiles the decode kernel for 64 rows and counts the final bundles of its steady
loop, one KV block or two with their DMAs: a bundle is a cycle at best. Beside it stands what HBM
allows: a kernel whose bundles stay under the cycles that its bytes take is bound by memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import sys
import tempfile
import time

import schedule

# HBM bytes a second (published) and Hz (from published matrix rates) of one core; 7x has two.
CHIPS = {"v5e": (819e9, 1.5e9), "v6e": (1640e9, 1.75e9), "7x": (3685e9, 1.9e9)}
ROWS, MAX_LEN = 64, 8192
BLOCKS = (128, 256, 512, 1024, 1536, 2048)  # KV tokens that tuning tries
TURNS = (1, 2)  # blocks in a turn of the decode loop
SPLITS = (64, 32)  # tokens in a turn of the loop that splits float32
ROOT = pathlib.Path(__file__).resolve().parent.parent
TUNED = ROOT / "pallas_kernels" / "tuned"
OTHERS = {
    "RPA v3": ROOT / "tests" / "data" / "rpa_v3_bundles.json",
    "tokamax": ROOT / "tests" / "data" / "tokamax_bundles.json",
}
PAGES = ("16", "128")
FOLDERS = {"v5e": "tpu_v5_lite", "v6e": "tpu_v6_lite", "7x": "tpu7x"}


@dataclasses.dataclass(frozen=True)
class Decode:
    """The decode loop of one compiled kernel."""

    block: int  # KV tokens
    turn: int  # blocks in a turn of the loop
    loop: schedule.Loop
    split: list[schedule.Loop]  # inside it: the loops that split float32 blocks, or nothing
    split_tokens: int  # in a turn of them

    @property
    def per_token(self) -> float:
        bundles = self.loop.bundles
        more_turns = self.block // self.split_tokens - 1
        bundles += sum(more_turns * loop.bundles for loop in self.split)
        return round(bundles / (self.turn * self.block), 2)

    @property
    def stays_in_registers(self) -> bool:
        return not (self.loop.ops.get("fills") or self.loop.ops.get("spills"))


def bundles(topology, names, page_sizes, kv_dtype, block_tokens, tune):
    """Prints one line for each shape and page size."""
    import deviceless

    with tempfile.TemporaryDirectory() as folder:
        deviceless.prepare(folder)
        target = deviceless.describe(topology)
        print(
            f"{'shape':22s}{'page':>5s}{'block':>6s}{'bundles/token':>15s}{'HBM cycles':>12s}  ops"
        )
        for name, page_size in itertools.product(names, page_sizes):
            measure = functools.partial(measure_decode, target, folder, name, page_size, kv_dtype)
            decode = tuned(measure, page_size) if tune else measure(block_tokens)
            need = hbm_cycles(topology, name, kv_dtype)
            ops = " ".join(f"{unit} {count}" for unit, count in decode.loop.ops.items())
            print(
                f"{name:22s}{page_size:5d}{decode.block:6d}{decode.per_token:15.2f}{need:12.2f}  "
                f"{ops}",
                flush=True,
            )
            if tune:
                keep(target, topology, name, page_size, kv_dtype, decode)


def recount(topology, names, page_sizes, kv_dtype):
    """Counts the kept blocks of a chip again, after a change of the kernel; keeps the counts."""
    import deviceless

    from jaxserve.pallas_kernels.ragged_paged_attention import shapes

    with tempfile.TemporaryDirectory() as folder:
        deviceless.prepare(folder)
        target = deviceless.describe(topology)
        file = tuned_file(target)
        by_heads = {f"{s.H}/{s.J}/{s.E}": s.name for s in shapes.SHAPES if s.name in names}
        for key in json.loads(file.read_text()):
            heads, _, page_size, dtype, kind = key.split(" ")
            wanted = heads in by_heads and int(page_size) in page_sizes and kind == "decode"
            if not wanted or kv_dtype not in (None, dtype):
                continue
            table = json.loads(file.read_text())
            sizes = table[key]["parameters"]
            decode = measure_decode(
                target, folder, by_heads[heads], int(page_size), dtype, sizes["block_tokens"]
            )
            before = table[key]["measured"]["bundles_per_token"]
            print(f"{key:40s}{before:8.2f} -> {decode.per_token:.2f}", flush=True)
            table[key]["measured"] |= counts(decode)
            file.write_text(json.dumps(table, indent=2) + "\n")


def tuned_file(target) -> pathlib.Path:
    from jaxserve.pallas_kernels import tuning

    with target.context():
        return TUNED / tuning.device_kind() / "ragged_paged_attention.json"


def counts(decode: Decode) -> dict:
    fills, spills = (decode.loop.ops.get(unit, 0) for unit in ("fills", "spills"))
    return {"bundles_per_token": decode.per_token, "fills": fills, "spills": spills}


def hbm_cycles(topology, name, kv_dtype) -> float:
    """Cycles in which HBM delivers one token's K and V to one core; NaN for an unknown chip."""
    bytes_s, clock = CHIPS.get(topology, (float("nan"), 1))
    return token_bytes(name, kv_dtype) / bytes_s * clock


def measure_decode(
    target, folder, name, page_size, kv_dtype, block_tokens, turn=None, split_tokens=None
) -> Decode:
    for file in pathlib.Path(folder).iterdir():
        file.unlink()
    plan = compile_decode(target, name, page_size, kv_dtype, block_tokens, turn, split_tokens)
    (loops,) = schedule.kernels(folder, "ragged_paged_attention").values()
    loop = schedule.decode_loop(loops)
    # Loops that put an fp8 page's scales in order, eight heads a turn, are counted as one turn.
    split = [] if plan.unpacks_fp8 else schedule.inside(loops, loop)
    expected = plan.turn_blocks if plan.splits else 0
    assert len(split) == expected, "bundles would count a loop's turns once"
    return Decode(plan.block_tokens, plan.turn_blocks, loop, split, plan.split_tokens)


def tuned(measure, page_size) -> Decode:
    """The best sizes that stay in registers; float32 is split in shorter turns if that helps."""
    for split_tokens in SPLITS:
        best = tuned_turn(functools.partial(measure, split_tokens=split_tokens), page_size)
        if best.stays_in_registers:
            return best
    return best


def tuned_turn(measure, page_size) -> Decode:
    """The smallest block within 3 % of the best; two of them a turn where that saves 1 %."""
    one, two = (smallest(functools.partial(measure, turn=turn), page_size) for turn in TURNS)
    better = two.per_token <= 0.99 * one.per_token
    return two if better and two.stays_in_registers else one


def smallest(measure, page_size) -> Decode:
    """The smallest block within 3 % of the best, tried up to the first that is no better."""
    least = math.lcm(page_size, 128)
    tried = []
    for block in (block for block in BLOCKS if block % least == 0):
        tried.append(measure(block))
        if not tried[-1].stays_in_registers or block > tried[-1].block:  # a window's limit
            break
        if len(tried) > 1 and tried[-1].per_token >= tried[-2].per_token:
            break
    good = [decode for decode in tried if decode.stays_in_registers] or tried
    best = min(decode.per_token for decode in good)
    return next(decode for decode in good if decode.per_token <= 1.03 * best)


def keep(target, topology, name, page_size, kv_dtype, decode: Decode):
    """Writes a block size and its measurement into the tuned data of the chip."""
    from jaxserve.pallas_kernels.ragged_paged_attention import shapes

    shape = next(s for s in shapes.SHAPES if s.name == name)
    file = tuned_file(target)
    table = json.loads(file.read_text()) if file.is_file() else {}
    key = f"{shape.H}/{shape.J}/{shape.E} page {page_size} {kv_dtype} decode"
    arguments = f"--topology={topology} --shapes={name} --page_sizes={page_size}"
    parameters = {"block_tokens": decode.block, "turn_blocks": decode.turn}
    if decode.split:
        parameters["split_tokens"] = decode.split_tokens
    table[key] = {
        "parameters": parameters,
        "measured": {
            **counts(decode),
            "hbm_cycles_per_token": round(hbm_cycles(topology, name, kv_dtype), 2),
            "how": f"tools/bench_attention.py {arguments} --kv_dtype={kv_dtype} --tune",
        },
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(table, indent=2) + "\n")


def table() -> str:
    """What is kept of every shape and chip, in Markdown: beside other kernels, then float32."""
    others = {name: json.loads(file.read_text()) for name, file in OTHERS.items()}
    beside = [title for name in others for title in (name, "of it")]
    titles = ["shape", "chip"]
    titles += [title for page in PAGES for title in (f"page {page}", *beside)]
    lines = [*heading(*titles, "HBM cycles")]
    for shape, chip in every_shape_and_chip():
        cells = [shape.name, chip]
        for page in PAGES:
            ours = kept(chip, shape, page, "bfloat16")
            cells.append(f"{ours['bundles_per_token']:.2f}")
            for other in others.values():
                theirs = other["bundles_per_token"].get(chip, {}).get(shape.name, {}).get(page)
                share = theirs and ours["bundles_per_token"] / theirs
                cells += [f"{theirs:.2f}", f"{share:.2f}"] if theirs else ["-", "-"]
        lines.append(line(*cells, f"{ours['hbm_cycles_per_token']:.2f}"))
    titles = [title for page in PAGES for title in (f"page {page}", "fills", "spills")]
    lines += ["", *heading("float32", "chip", *titles, "HBM cycles")]
    for shape, chip in every_shape_and_chip():
        cells = [shape.name, chip]
        for page in PAGES:
            ours = kept(chip, shape, page, "float32")
            if ours:
                counts = ours["fills"], ours["spills"]
                cells += [f"{ours['bundles_per_token']:.2f}", *map(str, counts)]
        if ours:
            lines.append(line(*cells, f"{ours['hbm_cycles_per_token']:.2f}"))
    return "\n".join(lines)


def every_shape_and_chip():
    from jaxserve.pallas_kernels.ragged_paged_attention import shapes

    return itertools.product(shapes.SHAPES, FOLDERS)


def kept(chip, shape, page, kv_dtype) -> dict | None:
    """What `keep` wrote as measured, if it did."""
    entries = json.loads((TUNED / FOLDERS[chip] / "ragged_paged_attention.json").read_text())
    key = f"{shape.H}/{shape.J}/{shape.E} page {page} {kv_dtype} decode"
    return entries[key]["measured"] if key in entries else None


def heading(*titles):
    """The first two lines of a table in Markdown."""
    return line(*titles), "|" + "---|" * len(titles)


def line(*cells):
    return f"| {' | '.join(cells)} |"


def token_bytes(name, kv_dtype):
    import jax.numpy as jnp

    from jaxserve.pallas_kernels.ragged_paged_attention import shapes

    shape = next(s for s in shapes.SHAPES if s.name == name)
    return 2 * shape.J * shape.E * jnp.dtype(kv_dtype).itemsize


def compile_decode(target, name, page_size, kv_dtype, block_tokens, turn_blocks, split_tokens):
    """Compiles the decode kernel for the target; -> its Plan."""
    import jax
    import jax.numpy as jnp

    from jaxserve.pallas_kernels.ragged_paged_attention import api, shapes, tpu

    shape = next(s for s in shapes.SHAPES if s.name == name)
    array = lambda dims, dtype=jnp.int32: jax.ShapeDtypeStruct(dims, dtype)
    bf16 = lambda heads: array((ROWS, heads, shape.E), jnp.bfloat16)
    batch = api.RaggedBatch(
        array((ROWS, MAX_LEN // page_size)),
        array((ROWS,)),
        array((ROWS + 1,)),
        array((1,)),
        array((1,)),
    )
    spec = api.KVSpec(2, shape.J, shape.E, page_size, kv_dtype)
    plans = []
    call = tpu.call

    def spy(plan, *args, **options):
        plans.append(plan)
        return call(plan, *args, **options)

    def step(q, k, v, kv_pages, batch, layer, sinks):
        return tpu.ragged_paged_attention(
            q, k, v, kv_pages, batch,
            layer=layer, scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap,
            sinks=sinks, block_tokens=block_tokens, turn_blocks=turn_blocks,
            split_tokens=split_tokens, decode_only=True,
        )  # fmt: skip

    tpu.call = spy
    try:
        target.compile(
            step,
            bf16(shape.H),
            bf16(shape.J),
            bf16(shape.J),
            api.kv_page_specs(spec, 512, "tpu"),
            batch,
            array(()),
            array((shape.H,), jnp.float32) if shape.sinks else None,
            donate=3,
        )
    finally:
        tpu.call = call
    return plans[0]


def timed(names, page_size, kv_dtype, backend):
    """Prints milliseconds and KV bandwidth of each batch on this machine's device."""
    import jax
    import jax.numpy as jnp

    from jaxserve.pallas_kernels.ragged_paged_attention import api, shapes

    platform = jax.default_backend()
    backend = backend or api.choose_backend(platform)
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    batches = [b.scaled(8) if platform == "cpu" else b for b in shapes.BATCHES if b.rows]
    print(f"{jax.devices()[0].device_kind}, backend {backend}, KV {kv_dtype}, page {page_size}")
    print(f"{'shape':22s}{'batch':18s}{'ms':>10s}{'KV GB/s':>10s}")
    for shape in (s for s in shapes.SHAPES if s.name in names):
        for rows in batches:
            seconds = time_one(shape, rows, page_size, dtype, kv_dtype, backend)
            read = sum(
                n if shape.window is None else min(n, shape.window + q) for q, n in rows.rows
            )
            rate = read * token_bytes(shape.name, kv_dtype) / seconds / 1e9
            print(f"{shape.name:22s}{rows.name:18s}{seconds * 1e3:10.3f}{rate:10.1f}", flush=True)


def time_one(shape, rows, page_size, dtype, kv_dtype, backend, repeats=20):
    """Median seconds of one call, its cache donated from call to call."""
    import statistics

    import jax

    from jaxserve.pallas_kernels.ragged_paged_attention import api, shapes

    case = shapes.make_case(shape, rows, page_size=page_size)
    q, k, v, pages, batch, sinks = shapes.place(case, backend, dtype, kv_dtype)
    call = jax.jit(
        functools.partial(
            api.ragged_paged_attention,
            layer=0, scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap,
            backend=backend,
        ),
        donate_argnums=3,
    )  # fmt: skip
    spent = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        out, pages = call(q, k, v, pages, batch, sinks=sinks)
        jax.block_until_ready(out)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[2:])


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--topology", help="v5e, v6e or 7x: read the schedule instead of timing")
    parser.add_argument("--shapes", help="comma-separated names of shapes.py; default: all")
    parser.add_argument("--page_sizes", default="16,128")
    parser.add_argument("--kv_dtype", default=None, help="default: bfloat16, on CPU float32")
    parser.add_argument("--block_tokens", type=int, default=None)
    parser.add_argument("--tune", action="store_true", help="try block sizes, keep the best")
    parser.add_argument("--recount", action="store_true", help="count what is kept, keep counts")
    parser.add_argument("--backend", default=None)
    parser.add_argument("--table", action="store_true", help="print what is kept, measure nothing")
    args = parser.parse_args(argv)
    if args.table:
        print(table())
        return 0
    import deviceless

    pages = [int(size) for size in args.page_sizes.split(",")]
    if args.topology:
        deviceless.prepare()
    try:
        names = args.shapes.split(",") if args.shapes else all_shapes()
        if args.topology and args.recount:
            recount(args.topology, names, pages, args.kv_dtype)
        elif args.topology:
            kv_dtype = args.kv_dtype or "bfloat16"
            bundles(args.topology, names, pages, kv_dtype, args.block_tokens, args.tune)
        else:
            import jax

            default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
            timed(names, pages[0], args.kv_dtype or default, args.backend)
    except (deviceless.Missing, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def all_shapes():
    from jaxserve.pallas_kernels.ragged_paged_attention import shapes

    return [shape.name for shape in shapes.SHAPES]


if __name__ == "__main__":
    sys.exit(main())

"""Reads the TPU compiler's final instruction schedule of a Pallas kernel: where its cycles go.

A TPU core issues one bundle of instructions a cycle when nothing stalls. So the bundles of a loop's
body are its cycles at best, and what a bundle holds tells which unit bounds it. The compiler writes
both as text when it is started with `dump_flags`.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re

UNITS = (
    "MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "fills", "VSTORE", "spills", "SALU",
)  # fmt: skip
_BUNDLE = re.compile(
    r"\s*0x[0-9a-f]+\s+(?P<mark>LH|LB|LE|PB)?\s*:\s*(?P<nest>(?:>+ ?)*)\{(?P<end>\})?"
)


def dump_flags(folder) -> str:
    """Value of LIBTPU_INIT_ARGS that makes the compiler write its final schedules into folder."""
    only = "--xla_jf_dump_llo_pass_label_regex=final"  # all passes would take longer than compiling
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true {only}"


@dataclasses.dataclass(frozen=True)
class Loop:
    """One loop body of a kernel."""

    depth: int
    bundles: int  # its own and those of loops inside, each counted once
    ops: dict[str, int]  # operations by unit


def kernels(folder, match: str = "") -> dict[str, list[Loop]]:
    """{kernel: its loops in program order} for the dumped kernels whose name contains match."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*final_bundles.txt")):
        name = re.sub(r"^\d+-|-\d+-final_bundles\.txt$", "", path.name)
        if match in name and "schedule-analysis" not in name:
            found[name] = _loops(_bundles(path), _units(path, name))
    return found


def decode_loop(loops: list[Loop]) -> Loop:
    """The kernel's steady loop: the first that multiplies matrices and has no such loop inside."""
    multiplies = lambda loop: bool(loop.ops.get("MXU"))
    return next(
        loop for loop in loops if multiplies(loop) and not any(map(multiplies, inside(loops, loop)))
    )


def inside(loops: list[Loop], loop: Loop) -> list[Loop]:
    """The loops nested in one of them."""
    (at,) = (i for i, other in enumerate(loops) if other is loop)
    return list(itertools.takewhile(lambda other: other.depth > loop.depth, loops[at + 1 :]))


def _bundles(path) -> list[tuple[bool, int]]:
    """(starts a loop body, nesting depth) of each bundle. Empty bundles carry no nesting marks."""
    rows, depth = [], 0
    for line in path.read_text(errors="replace").splitlines():
        match = _BUNDLE.match(line)
        if match:
            if not match["end"]:
                depth = match["nest"].count(">")
            rows.append((match["mark"] == "LB", depth))
    return rows


def _units(path, name) -> list[list[int]]:
    """Operations by unit of each bundle, or nothing when the compiler did not say."""
    stamp = path.name.split("-")[0]
    pattern = f"{stamp}-*final_hlo-static-per-bundle-utilization.txt"
    for table in path.parent.glob(pattern):
        if f"-{name}-" in table.name:
            lines = (line.split() for line in table.read_text().splitlines())
            return [
                [int(n) for n in line]
                for line in lines
                if len(line) == len(UNITS) and all(n.isdigit() for n in line)
            ]
    return []


def _loops(rows, units) -> list[Loop]:
    spans, open_loops = [], []
    for i, (starts, depth) in enumerate([*rows, (False, -1)]):
        while open_loops and (depth < open_loops[-1][0] or (starts and depth <= open_loops[-1][0])):
            began = open_loops.pop()
            spans.append((began[1], i, began[0]))
        if starts:
            open_loops.append((depth, i))
    loops = []
    for first, end, depth in sorted(spans):
        counts = [sum(column) for column in zip(*units[first:end])] if units else []
        ops = {unit: count for unit, count in zip(UNITS, counts) if count}
        loops.append(Loop(depth, end - first, ops))
    return loops

"""Reads the machine code of a Mosaic GPU kernel: how long its loops take to issue.

A multiprocessor has four schedulers, each of which issues one instruction of one of its warps a
cycle; a warpgroup has a warp on each. The compiler writes behind every instruction for how many
cycles its warp issues nothing more. So a loop's instructions bound how many blocks a multiprocessor
can attend, and their cycles how soon one program attends the next, nothing being late.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import pathlib
import re

SHORTEST = 30  # instructions; shorter loops are waits
UNITS = {
    "tensor": ("HGMMA",),
    "TMA": ("UTMALDG", "UTMASTG", "UBLKCP"),
    "exp2": ("MUFU",),
    "float": ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP"),
    "convert": ("F2FP", "I2F", "I2FP", "F2F", "HADD2", "HFMA2", "PRMT"),
    "shared": ("LDS", "STS", "LDSM", "STSM"),
    "spills": ("LDL", "STL"),
    "barrier": ("BAR", "SYNCS", "WARPGROUP", "FENCE", "DEPBAR"),
}
_UNIT_OF = {name: unit for unit, names in UNITS.items() for name in names}
_LABEL = re.compile(r"^(\.L_x_\d+):")
_LINE = re.compile(
    r":(?P<stall>\d+)\s+/\*[0-9a-f]+\*/\s+(?P<guard>@!?U?P\d+ )?\s*(?P<name>[A-Z][A-Z0-9_]*)\S*"
    r"(?P<operands>.*)"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    stall: int  # cycles
    target: str | None  # the label that it jumps to
    always: bool  # whether it does so


@dataclasses.dataclass(frozen=True)
class Loop:
    """One loop body of a kernel: all of its instructions, and those of the shortest way through."""

    instructions: int
    shortest: int
    cycles: int  # of the shortest way, for a warp alone
    ops: dict[str, int]  # all instructions, by unit


def disassembler_found() -> bool:
    """Whether the compiler finds the program that it writes machine code with."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else ()
    return any(pathlib.Path(place, "cu13", "bin", "nvdisasm").exists() for place in places)


def kernels(folder, match: str = "") -> dict[str, list[Loop]]:
    """{kernel: its loops in program order} of those dumped whose name contains match."""
    paths = sorted(pathlib.Path(folder).glob("*.sass_ctrl"))
    return {path.stem: loops(path.read_text()) for path in paths if match in path.stem}


def attending_loop(loops: list[Loop]) -> Loop:
    """The loop of a compute warpgroup over KV blocks."""
    return max(loops, key=lambda loop: loop.ops.get("tensor", 0))


def loops(text: str) -> list[Loop]:
    code, labels = _parse(text)
    spans = [
        (labels[instruction.target], at + 1)
        for at, instruction in enumerate(code)
        if labels.get(instruction.target, at + 1) <= at
    ]
    # A wait that fails repeats behind the loops, and jumps back into the middle of one.
    whole = [
        (begin, end)
        for begin, end in sorted(spans)
        if end - begin >= SHORTEST and not any(b < begin < e < end for b, e in spans)
    ]
    return [_loop(code, labels, *span) for span in whole]


def _parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    code, labels = [], {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.search(line):
            jump = re.search(r"\((\.L_x_\d+)\)", found["operands"])
            target = jump[1] if jump and found["name"] == "BRA" else None
            # A branch may depend on a second predicate, among its operands.
            always = found["guard"] is None and not re.match(r"\s*!?U?P\d", found["operands"])
            code.append(Instruction(found["name"], int(found["stall"]), target, always))
    return code, labels


def _loop(code, labels, begin, end) -> Loop:
    """Branches forward skip what not every round does."""
    never = (10**9, 10**9)
    reached = {begin: (0, 0)}  # instructions and cycles before an instruction
    reach = lambda at, when: reached.update({at: min(reached.get(at, never), when)})
    for at in range(begin, end):
        instruction, (count, cycles) = code[at], reached.get(at, never)
        then = (count + 1, cycles + instruction.stall)
        target = labels.get(instruction.target, -1)
        if at < target < end:
            reach(target, then)
        if not (instruction.always and target >= 0) or at + 1 == end:
            reach(at + 1, then)
    units = collections.Counter(
        _UNIT_OF.get(instruction.name, "other") for instruction in code[begin:end]
    )
    return Loop(end - begin, *reached[end], dict(units))

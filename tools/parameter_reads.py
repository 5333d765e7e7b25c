"""How often a compiled program reads each of its parameters from memory, by its optimised HLO.

A step at the memory limit reads every weight once. What can go wrong shows in the HLO: a copy in
another layout or type that is read again, or a second use that was not joined with the first.
Followed are tuples, loops, branches, fusions and copies; what lies in a TPU's own memory (printed
as memory space 1) costs nothing to read again.
"""

from __future__ import annotations

import dataclasses
import math
import re

BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8}  # others carry their bits in their names
SLICES = frozenset({"dynamic-slice", "slice", "gather"})
ALIASES = frozenset({"bitcast", "get-tuple-element", "opt-barrier"})
PRODUCTS = frozenset({"dot", "convolution", "custom-call", "reduce"})
_COMPUTATION = re.compile(r"^(ENTRY )?%([^ ]+) \(.*\{$")
_OP = re.compile(r"^ +(?:ROOT )?%([^ ]+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\(([^)]*)\)(.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Op:
    name: str
    shape: str  # as printed: type, dimensions, layout
    code: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([^ ,]+)", self.arguments)

    def called(self, role: str) -> list[str]:
        """Names of the computations that an attribute lists."""
        listed = re.search(rf"\b{role}=(?:%([^ ,]+)|\{{([^}}]*)\}})", self.attributes)
        return [listed[1]] if listed[1] else re.findall(r"%([^ ,]+)", listed[2])


def parameter_reads(text: str, prefix: str = "params") -> dict[str, tuple[int, int]]:
    """{name: (bytes read from memory, its bytes)} of the entry's parameters named prefix..."""
    program = Program(text)
    return {
        op.name: (program.read(program.entry, op.name, op.shape), nbytes(op.shape))
        for op in program.computations[program.entry]
        if op.code == "parameter" and op.name.startswith(prefix)
    }


def nbytes(shape: str) -> int:
    """Bytes of the arrays in a printed shape, without padding."""
    total = 0
    for kind, dims in _ARRAY.findall(shape):
        bits = BITS.get(kind) or int(re.search(r"\d+", kind)[0])
        total += math.prod(int(n) for n in dims.split(",") if n) * bits // 8
    return total


class Program:
    """The computations of an HLO module, and the walk through them."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Op]] = {}
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                ops = self.computations[head[2]] = []
                if head[1]:
                    self.entry = head[2]
            elif match := _OP.match(line):
                ops.append(Op(*match.groups()))

    def read(self, where: str, name: str, shape: str) -> int:
        """Bytes that computation `where` reads of a value in memory, copies of it included."""
        if "S(1)" in shape:
            return 0
        return sum(self._use(where, op, place, shape) for op, place in self._users(where, name))

    def _users(self, where, name):
        for op in self.computations[where]:
            yield from ((op, i) for i, operand in enumerate(op.operands) if operand == name)

    def _use(self, where, op, place, shape):
        if op.code == "tuple":
            return sum(self._element(user, place, shape) for user, _ in self._users(where, op.name))
        if op.code in ALIASES:
            return self.read(where, op.name, shape)
        if op.code.endswith("-start"):
            done = next(user for user, _ in self._users(where, op.name))
            return nbytes(done.shape) + self.read(where, done.name, done.shape)
        if op.code in PRODUCTS:
            return nbytes(shape)
        if op.code == "fusion":
            (inside,) = op.called("calls")
            read = self._fused(inside, place, shape)
            return read if self._reduces(inside) else read + self.read(where, op.name, op.shape)
        read = min(nbytes(shape), nbytes(op.shape)) if op.code in SLICES else nbytes(shape)
        return read + self.read(where, op.name, op.shape)

    def _element(self, user, index, shape):
        """Bytes read of a tuple's element by a loop or a branch that takes the tuple."""
        if user.code == "while":
            return self._trips(user) * self._argument(*user.called("body"), index, shape)
        if user.code == "conditional":
            branches = user.called("branch_computations")
            return max(self._argument(branch, index, shape) for branch in branches)
        return 0

    def _argument(self, where, index, shape):
        element = re.compile(rf"\bindex={index}\b")
        return sum(
            self.read(where, op.name, shape)
            for op in self.computations[where]
            if op.code == "get-tuple-element"
            and element.search(op.attributes)
            and self._code(where, op.operands[0]) == "parameter"
        )

    def _trips(self, loop):
        """How often a counted loop runs: as XLA noted it, or the bound of its condition."""
        if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
            return int(noted[1])
        ops = self.computations[loop.called("condition")[0]]
        return max(int(op.arguments) for op in ops if op.code == "constant")

    def _fused(self, where, place, shape):
        """Bytes that a fusion reads of its operand: all of it, or the slices that it takes."""
        ops = self.computations[where]
        name = next(op.name for op in ops if op.code == "parameter" and op.arguments == str(place))
        return min(nbytes(shape), self._read_inside(where, name, shape))

    def _read_inside(self, where, name, shape):
        """Bytes of a value that a fusion's operations touch; what they pass on is never stored."""
        read = 0
        for op, place in self._users(where, name):
            if op.code in SLICES:
                read += nbytes(op.shape)
            elif op.code in ALIASES or op.code == "copy":
                read += self._read_inside(where, op.name, shape)
            elif op.code == "fusion":
                (inside,) = op.called("calls")
                inner = self._fused(inside, place, shape)
                passed_on = inner == nbytes(shape) and not self._reduces(inside)
                read += self._read_inside(where, op.name, shape) if passed_on else inner
            else:
                read += nbytes(shape)
        return read or nbytes(shape)  # the fusion's own result: all of it

    def _reduces(self, where):
        """Whether a fusion makes something else of its operands, not a copy of one."""
        return any(
            op.code in PRODUCTS or (op.code == "fusion" and self._reduces(*op.called("calls")))
            for op in self.computations[where]
        )

    def _code(self, where, name):
        return next(op.code for op in self.computations[where] if op.name == name)

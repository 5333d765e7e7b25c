"""Jinja for strangers' templates: no way out to Python, and bounds on time, size and depth.

A chat template comes with a model, so it is input. Jinja's sandbox keeps it from attributes and
from changing what it is given; it does not bound work. Here every loop turn, call and filter passes
a `Meter`, which stops a render that uses too much processor time, and what a template
joins, prints, compares or multiplies may weigh no more than MAX_WEIGHT, counted as if nothing in it
were shared. Between two checks an operation is linear in things of that weight, so stopping comes
soon.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
from collections.abc import Callable, Iterable
from typing import ClassVar

import jinja2
import jinja2.defaults
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

MAX_TEMPLATE_CHARS = 512 * 1024
MAX_WEIGHT = 8 * 1024 * 1024
ELEMENT_WEIGHT = 16  # of each value, beside the characters of strings
MAX_SECONDS = 0.5  # of this thread's processor time; templates take a millisecond
MAX_NUMBER_BITS = 256
MAX_FORMAT_CHARS = 256
MAX_INDENT = 16
TICKS_PER_CLOCK_READ = 128

# Filters and tests whose work grows with all that their arguments hold, not with their number.
WEIGHING_FILTERS = {"string", "tojson", "sort", "dictsort", "unique", "min", "max", "_weighed"}
COMPARING_TESTS = {
    "==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "lt", "lessthan", "le", "gt",
    "greaterthan", "ge", "in",
}  # fmt: skip
FILTERS = {
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "reverse", "round", "safe", "select", "selectattr", "sort", "string", "title", "trim",
    "unique", "upper", "wordcount",
}  # fmt: skip
METHODS = {
    str: {
        "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum",
        "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle",
        "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
        "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines",
        "startswith", "strip", "swapcase", "title", "upper",
    },
    dict: {"get", "items", "keys", "values"},
    list: set(),
    tuple: set(),
}  # fmt: skip
GROWING_METHODS = {"format", "join", "replace"}


class TemplateError(ValueError):
    """A template that cannot be used for this chat; the message says what to change."""


class Meter:
    """Stops a render that takes too long or builds too much. One per render."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._end = clock() + MAX_SECONDS
        self._ticks = 0

    def check_time(self) -> None:
        if self._clock() > self._end:
            raise TemplateError(
                f"the chat template ran for more than {MAX_SECONDS:g} s; give another one with "
                "--chat_template"
            )

    def tick(self) -> None:
        """Counts something small; every so many times it looks at the clock."""
        self._ticks += 1
        if self._ticks % TICKS_PER_CLOCK_READ == 0:
            self.check_time()

    def loop(self, items: Iterable):
        for item in items:
            self.tick()
            yield item

    def weigh(self, *values) -> int:
        """Weight of the values, counted as if nothing were shared; raises when it is too much."""
        weight, stack = 0, list(values)
        while stack:
            value = stack.pop()
            self.tick()
            weight += ELEMENT_WEIGHT
            if isinstance(value, str):
                weight += len(value)
            elif isinstance(value, dict):
                stack.extend(value)
                stack.extend(value.values())
            elif isinstance(value, (list, tuple)):
                stack.extend(value)
            self.check(weight)
        return weight

    @staticmethod
    def check(weight: int) -> None:
        if weight > MAX_WEIGHT:
            raise TemplateError(
                f"the chat template built more than {MAX_WEIGHT} characters; send less text, or "
                "give another template with --chat_template"
            )


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox that templates are compiled in. Renders from several threads may overlap."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, now: Callable[[], datetime.datetime] = datetime.datetime.now):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding would work before any Meter runs
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
        )
        self._running = threading.local()
        self.filters = _filters(self)
        self.tests |= {name: _metered(self, self.tests[name], True) for name in COMPARING_TESTS}
        keep = ("range", "dict", "namespace", "cycler", "joiner")
        self.globals = {name: self.globals[name] for name in keep}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(str(form)[:MAX_FORMAT_CHARS])

    @property
    def meter(self) -> Meter:
        return self._running.meter

    def start(self, meter: Meter) -> None:
        """Sets the meter of the render that begins on this thread."""
        self._running.meter = meter

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins output; compiled templates call it for every block, macro and result."""
        kept, weight = [], 0
        for piece in pieces:
            self.meter.tick()
            weight += len(piece)
            self.meter.check(weight)
            kept.append(piece)
        return "".join(kept)

    def syntax(self, source: str) -> jinja2.nodes.Template:
        """The syntax tree as written."""
        return super()._parse(source, None, None)

    def _parse(self, source, name, filename):
        return _Metering().visit(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj, attr, value):
        for kind, names in METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj, attribute):
        if isinstance(obj, str) and attribute in GROWING_METHODS:
            return self._bounded_method(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context, obj, /, *args, **kwargs):
        self.meter.check_time()
        if isinstance(obj, jinja2.runtime.LoopContext) and args:  # a recursive loop's next level
            args = (self.meter.loop(args[0]), *args[1:])
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context, operator, left, right):
        self.meter.check_time()
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            _check_numbers(operator, left, right)
        elif operator == "*":
            times = next((v for v in (left, right) if isinstance(v, int)), 1)
            self.meter.check(self.meter.weigh(left, right) * max(times, 1))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            self.meter.check(len(left) + left.count("%") * self.meter.weigh(right))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self.meter.check(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def _bounded_method(self, text: str, name: str):
        """str.format, join or replace with a look at the size of what it will make."""
        method = super().getattr(text, name)

        def bounded(*args, **kwargs):
            args = [list(self.meter.loop(a)) if hasattr(a, "__next__") else a for a in args]
            weight = self.meter.weigh(args, kwargs)
            if name == "format":
                _check_format(text)
                weight *= text.count("{") + 1
            elif name == "join":
                weight += len(text) * (len(args[0]) if args else 0)
            else:
                weight *= _occurrences(text, args)
            self.meter.check(len(text) + weight)
            return method(*args, **kwargs)

        return bounded


class GenerationBlock(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks the model's words for trainers: no effect."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Metering(jinja2.visitor.NodeTransformer):
    """Puts the meter into a template's syntax tree where Jinja offers no hook of its own."""

    def visit_For(self, node):
        self.generic_visit(node)
        node.iter = _call_filter("_loop", node.iter)
        return node

    def visit_Concat(self, node):
        self.generic_visit(node)
        return _call_filter("_concat", jinja2.nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node):
        self.generic_visit(node)
        node.expr = _call_filter("_weighed", node.expr)
        for operand in node.ops:
            operand.expr = _call_filter("_weighed", operand.expr)
        return node

    def visit_Tuple(self, node):
        self.generic_visit(node)
        return _call_filter("_weighed", node) if node.ctx == "load" else node


def _call_filter(name, node):
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _filters(environment: BoundedEnvironment) -> dict[str, Callable]:
    """What templates may use: Jinja's harmless filters, bounded ones, and those of _Metering."""

    def join(items, separator="", attribute=None):
        if attribute is not None:
            items = map(jinja2.filters.make_attrgetter(environment, attribute), items)
        return environment.getattr(str(separator), "join")([str(i) for i in _weighed(items)])

    def replace(text, old, new, count=-1):
        return environment.getattr(str(text), "replace")(str(old), str(new), count)

    def format(text, *args, **kwargs):
        return environment.call_binop(None, "%", str(text), kwargs or args)

    def indent(text, width=4, first=False, blank=False):
        text, margin = str(text), width if isinstance(width, str) else " " * min(width, 999)
        environment.meter.check(len(text) + text.count("\n") * len(margin))
        lines = text.splitlines(keepends=True)
        keep = lambda n, line: (n == 0 and not first) or not (blank or line.strip())
        return "".join(line if keep(n, line) else margin + line for n, line in enumerate(lines))

    def _weighed(value):
        value = list(environment.meter.loop(value)) if hasattr(value, "__next__") else value
        environment.meter.weigh(value)
        return value

    filters = {name: jinja2.defaults.DEFAULT_FILTERS[name] for name in FILTERS}
    filters |= {"join": join, "replace": replace, "format": format, "indent": indent}
    filters["tojson"] = _tojson
    filters["_loop"] = lambda items: environment.meter.loop(items)
    filters["_concat"] = lambda parts: environment.concat(map(str, _weighed(parts)))
    filters["_weighed"] = lambda value: value
    return {n: _metered(environment, f, n in WEIGHING_FILTERS) for n, f in filters.items()}


def _metered(environment: BoundedEnvironment, function: Callable, weighs: bool) -> Callable:
    """A filter that ticks, and if `weighs`, refuses to work on too much."""

    @functools.wraps(function)
    def metered(*args, **kwargs):
        meter = environment.meter
        meter.check_time()
        if weighs:
            args = [list(meter.loop(a)) if hasattr(a, "__next__") else a for a in args]
            meter.weigh(*args, kwargs)
        return function(*args, **kwargs)

    return metered


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """JSON as models saw it in training: no HTML escapes, non-ASCII kept."""
    if indent is not None and not 0 <= indent <= MAX_INDENT:
        raise TemplateError(f"tojson(indent={indent}): at most {MAX_INDENT}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@jinja2.pass_context
def _finalize(context, value):
    """Looks at each printed value first; taking the context also keeps it from compile time."""
    if not isinstance(value, str):
        context.environment.meter.weigh(value)
    return value


def _raise_exception(message):
    raise TemplateError(f"the chat template refuses this chat: {message}")


def _occurrences(text: str, args) -> int:
    """How many times str.replace(*args) can replace, at most; 1 for arguments it will refuse."""
    if not args or not isinstance(args[0], str):
        return 1
    return len(text) // max(1, len(args[0])) + 1


def _check_numbers(operator: str, left, right) -> None:
    """Keeps integers short: products and powers of long ones cost time and memory."""
    bits = max((n.bit_length() for n in (left, right) if isinstance(n, int)), default=0)
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1)
    if bits > MAX_NUMBER_BITS:
        raise TemplateError(f"the chat template computes with numbers over 2**{MAX_NUMBER_BITS}")


def _check_format(form: str) -> None:
    """Refuses field widths that are long, or computed."""
    if re.search(r"\d{4}|%[^a-zA-Z%]*\*|\{[^{}]*\{", form):
        raise TemplateError(f"the chat template pads text too widely: {form[:80]!r}")

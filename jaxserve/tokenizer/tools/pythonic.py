"""Calls written as in Python: name(key=value, ...)."""

from __future__ import annotations

import ast
import json
import re
from typing import ClassVar

from jaxserve.tokenizer.tools.parser import END, ToolParser

# Python's "\ud83d" is half a character, which UTF-8 cannot carry: it stays an escape in JSON.
_SURROGATES = re.compile("[\ud800-\udfff]")


class PythonicParser(ToolParser):
    """[name(key=value, ...), ...] as in Python: Llama 4, Gemma 3. A call leaves when whole."""

    name = "pythonic"

    def _read(self):
        if (yield from self._word()) == "[":
            while (yield from self._call()):
                self._seen.clear()
                if (yield from self._word()) != ",":
                    self._seen.clear()
                    break
        self._give_back()
        yield from self._rest()

    def _call(self):
        name, char = "", (yield from self._word())
        while char and (char.isalnum() or char in "_."):
            name += char
            char = yield from self._char()
        if char != "(" or not self._callable(name):
            return False
        text, depth, quote, escaped = "(", 1, "", False
        while depth:
            char = yield from self._char()
            if char == END:
                return False
            text += char
            if quote:
                quote = "" if char == quote and not escaped else quote
                escaped = char == "\\" and not escaped
            elif char in "'\"":
                quote = char
            else:
                depth += (char in "([{") - (char in ")]}")
        arguments = python_arguments(text)
        if arguments is None:
            return False
        self._begin(name)
        self._arguments(arguments)
        return True


def python_arguments(text: str) -> str | None:
    """JSON text of the keyword arguments in a parenthesis; None if they are no plain values."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            values[keyword.arg] = ast.literal_eval(_JsonNames().visit(keyword.value))
        written = json.dumps(values, ensure_ascii=False, allow_nan=False)
        return _SURROGATES.sub(lambda half: f"\\u{ord(half[0]):04x}", written)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _JsonNames(ast.NodeTransformer):
    """true, false and null, as models write them among Python's values."""

    VALUES: ClassVar = {"true": True, "false": False, "null": None}

    def visit_Name(self, node):
        if node.id in self.VALUES:
            return ast.copy_location(ast.Constant(self.VALUES[node.id]), node)
        return node

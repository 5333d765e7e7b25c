"""The tools of a request and its choice among them, in OpenAI's words and in Anthropic's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable

from jaxserve.server.errors import ApiError, quote

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclasses.dataclass(frozen=True)
class Toolbox:
    """What the model is shown, and what it may do with it.

    functions: OpenAI's function objects, checked; none when no tool may be called. allowed: names
    of those that may be called. forced: the answer must call. single: no more than one call.
    """

    functions: list[dict] = dataclasses.field(default_factory=list)
    allowed: frozenset[str] = frozenset()
    forced: bool = False
    single: bool = False

    @property
    def constrained(self) -> bool:
        """Whether calls must be held to a grammar: the model alone would not keep the rules."""
        strict = any(f.get("strict") for f in self.functions if f["name"] in self.allowed)
        return self.forced or strict or len(self.allowed) < len(self.functions)

    @property
    def schemas(self) -> dict[str, dict | None]:
        """Each name with its parameters' schema."""
        return {function["name"]: function.get("parameters") for function in self.functions}


def of_openai(
    tools: list[dict] | None, choice: str | dict | None, *, parallel: bool | None
) -> Toolbox:
    """From tools, tool_choice and parallel_tool_calls of a chat; raises ApiError."""
    functions = checked_functions(tools)
    single = parallel is False
    names = [function["name"] for function in functions]
    match choice:
        case None | "auto":
            return Toolbox(functions, frozenset(names), single=single)
        case "none":
            return Toolbox()
        case "required":
            return _limited(functions, names, forced=True, single=single)
        case {"type": "function", "function": {"name": str(name)}}:
            return _limited(functions, [name], forced=True, single=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(entries)}}:
            if mode not in ("auto", "required"):
                raise _refused("tool_choice", f"mode {quote(mode)} is not auto or required")
            chosen = [_named(entry) for entry in entries]
            return _limited(functions, chosen, forced=mode == "required", single=single)
    rule = f"{quote(choice)} is not auto, none, required, or an object that names functions"
    raise _refused("tool_choice", rule)


def of_anthropic(tools: list[dict] | None, choice: dict | None) -> Toolbox:
    """From tools and tool_choice of a message; raises ApiError."""
    choice = choice or {"type": "auto"}
    functions = checked_functions([_as_openai(tool) for tool in tools or ()])
    single = bool(choice.get("disable_parallel_tool_use"))
    names = [function["name"] for function in functions]
    match choice:
        case {"type": "auto"}:
            return Toolbox(functions, frozenset(names), single=single)
        case {"type": "none"}:
            return Toolbox()
        case {"type": "any"}:
            return _limited(functions, names, forced=True, single=single)
        case {"type": "tool", "name": str(name)}:
            return _limited(functions, [name], forced=True, single=True)
    raise _refused("tool_choice", f"{quote(choice)} is not auto, none, any, or tool with a name")


def _named(entry) -> str:
    match entry:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise _refused("tool_choice", f"{quote(entry)} does not name a function")


def _limited(functions: list[dict], names: Collection[str], **rules: bool) -> Toolbox:
    known = {function["name"] for function in functions}
    if not names:
        raise _refused("tool_choice", "there is no tool to choose")
    for name in names:
        if name not in known:
            raise _refused("tool_choice", f"{quote(name)} is not among the tools")
    return Toolbox(functions, frozenset(names), **rules)


def _as_openai(tool: dict) -> dict:
    if tool.get("type", "custom") != "custom":
        return tool  # refused as it is, by its type
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def checked_functions(tool_list: Iterable[dict] | None) -> list[dict]:
    """The function objects of [{"type": "function", "function": {...}}]; raises ApiError."""
    tool_list = list(tool_list or ())
    if len(tool_list) > MAX_TOOLS:
        raise _refused("tools", f"{len(tool_list)} of them; at most {MAX_TOOLS}")
    functions = []
    for i, tool in enumerate(tool_list):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            kind = quote(tool.get("type"))
            raise _refused("tools", f"entry {i} has type {kind}; only function is known")
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            rule = f"entry {i} has name {quote(name)}: 1 to 64 of A-Z a-z 0-9 _ . -"
            raise _refused("tools", rule)
        if not isinstance(function.get("parameters", {}), dict | None):
            raise _refused("tools", f"{name}.parameters must be a JSON schema object")
        functions.append(function)
    if len({function["name"] for function in functions}) != len(functions):
        raise _refused("tools", "two of them have the same name")
    return functions


def _refused(field: str, rule: str) -> ApiError:
    return ApiError(400, f"{field}: {rule}", "invalid_value", field)

"""Tool calls in a model's text, by format: parser.py has the machinery, the others a format each.

`find_parser` chooses; grammars that make a model write such calls are in jaxserve.grammar.calls.
"""

from __future__ import annotations

from jaxserve.tokenizer.tools.json_calls import HermesParser, Llama3Parser, MistralParser
from jaxserve.tokenizer.tools.parser import CallDelta, ToolCall, ToolParser, parse
from jaxserve.tokenizer.tools.pythonic import PythonicParser

__all__ = ["PARSERS", "CallDelta", "ToolCall", "ToolParser", "find_parser", "parse"]

PARSERS: dict[str, type[ToolParser]] = {
    parser.name: parser for parser in (HermesParser, Llama3Parser, MistralParser, PythonicParser)
}


def find_parser(name: str | None, chat_template: str | None) -> type[ToolParser] | None:
    """The parser of a name, or for None the one that fits the template; None if none does."""
    if name is not None:
        if name not in PARSERS:
            raise ValueError(f"tool parser {name!r}: choose one of {', '.join(PARSERS)}")
        return PARSERS[name]
    template = chat_template or ""
    if "[TOOL_CALLS]" in template:
        return MistralParser
    if "<tool_call>" in template:
        return None if "<function=" in template else HermesParser
    if "func_name1(" in template or "[func_name" in template:
        return PythonicParser
    if '"parameters": ' in template and "ipython" in template:
        return Llama3Parser
    return None

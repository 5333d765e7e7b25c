"""Tool calls in a model's text, by format: parser.py has the machinery, the others a format each.

`find_parser` chooses; grammars that make a model write such calls are in jaxserve.grammar.calls.
"""

from __future__ import annotations

import re

from jaxserve.tokenizer.tools.gemma import Gemma4Parser
from jaxserve.tokenizer.tools.json_calls import (
    DeepSeekParser,
    HermesParser,
    Llama3Parser,
    MistralParser,
    Phi4Parser,
)
from jaxserve.tokenizer.tools.parser import CallDelta, ToolCall, ToolParser, parse
from jaxserve.tokenizer.tools.pythonic import PythonicParser
from jaxserve.tokenizer.tools.tagged import Qwen3CoderParser

__all__ = ["PARSERS", "CallDelta", "ToolCall", "ToolParser", "find_parser", "parse"]

PARSERS: dict[str, type[ToolParser]] = {
    parser.name: parser
    for parser in (
        HermesParser, Llama3Parser, MistralParser, PythonicParser, Qwen3CoderParser, DeepSeekParser,
        Phi4Parser, Gemma4Parser,
    )
}  # fmt: skip


def find_parser(name: str | None, chat_template: str | None) -> type[ToolParser] | None:
    """The parser of a name, or for None the one that fits the template; None if none does."""
    if name is not None:
        if name not in PARSERS:
            raise ValueError(f"tool parser {name!r}: choose one of {', '.join(PARSERS)}")
        return PARSERS[name]
    template = chat_template or ""
    if not re.search(r"\btools\b", template):
        return None  # it may show past calls, but would never tell the model of any tool
    signs = {
        "[TOOL_CALLS]": MistralParser,
        DeepSeekParser.BEGIN: DeepSeekParser,
        "<|tool_call>call:": Gemma4Parser,
        "functools[": Phi4Parser,
        "<function=": Qwen3CoderParser,
        "<tool_call>": HermesParser,
        "func_name1(": PythonicParser,
        "[func_name": PythonicParser,
    }
    for sign, parser in signs.items():
        if sign in template:
            return parser
    return Llama3Parser if '"parameters": ' in template and "ipython" in template else None

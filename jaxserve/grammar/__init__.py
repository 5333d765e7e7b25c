"""Structured output: what a request may ask for, compiled to masks over the vocabulary."""

from jaxserve.grammar.calls import Calls, Thought, framed
from jaxserve.grammar.compiler import GrammarCompiler, GrammarMatcher
from jaxserve.grammar.spec import GrammarRefused, GrammarSpec

__all__ = [
    "Calls", "GrammarCompiler", "GrammarMatcher", "GrammarRefused", "GrammarSpec", "Thought",
    "framed",
]  # fmt: skip

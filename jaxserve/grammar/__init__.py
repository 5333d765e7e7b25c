"""Structured output: what a request may ask for, compiled to masks over the vocabulary."""

from jaxserve.grammar.compiler import GrammarCompiler, GrammarMatcher
from jaxserve.grammar.spec import GrammarRefused, GrammarSpec

__all__ = ["GrammarCompiler", "GrammarMatcher", "GrammarRefused", "GrammarSpec"]

"""Grammars compiled for one vocabulary, and the state of one output in its grammar.

llguidance does the work (Earley parsing over derivatives of regular expressions, and a trie of the
vocabulary). It counts what it does and stops at the limits below, so compiling and every mask have
a bounded cost; a grammar that needs more is refused, or ends its request alone. That bound counts
steps, of which some take a hundred times as long as others: see jaxserve.engine.masks.
"""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Callable

import llguidance
import numpy as np

from jaxserve.grammar.spec import GrammarRefused, GrammarSpec, schema_options
from jaxserve.tokenizer import Tokenizer

MAX_CACHED = 64  # compiled grammars kept

LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # about 20 ms of building regular expressions
    "step_lexer_fuel": 200_000,  # about 15 ms of them in one mask
    # 3 ms of parsing in one mask as a rule, which objects of 450 optional properties need; in
    # grammars that read one text in countless ways, more than a second.
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # some 400 bytes each
    "max_grammar_size": 100_000,  # symbols
    "verbose_errors": False,  # messages hold no text of the output
}


class GrammarFailed(RuntimeError):
    """An output's grammar cannot go on: a limit was reached. Only that output is affected."""


class GrammarCompiler:
    """Compiles specs for one tokenizer, and keeps what was used last. Thread-safe.

    vocab_size: columns of the model's logits; ids that the tokenizer does not have are never
    allowed. Compiling releases the GIL; it belongs on a thread that may wait.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        if not tokenizer.eos_ids:
            raise ValueError("structured output needs a tokenizer with an end token")
        self.vocab_size = vocab_size
        self.mask_words = -(-vocab_size // 32)
        self._vocabulary = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size)),
            eos_token=sorted(tokenizer.eos_ids),
        )
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._take = _Taker(self._vocabulary)
        self._cache: collections.OrderedDict[GrammarSpec, llguidance.LLMatcher] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def matcher(self, spec: GrammarSpec) -> GrammarMatcher:
        """A matcher at the beginning of an output. Raises GrammarRefused."""
        with self._lock:
            compiled = self._cache.get(spec)
            if compiled is not None:
                self._cache.move_to_end(spec)
        if compiled is None:
            compiled = self._compiled(spec)
        anew = lambda: self._compiled(spec).deep_copy()
        return GrammarMatcher(compiled.deep_copy(), self.mask_words, self._take, anew)

    def _check(self, spec: GrammarSpec, compiled: llguidance.LLMatcher) -> None:
        """Raises GrammarRefused unless there is a first token, at a bounded cost."""
        if compiled.is_error():
            raise GrammarRefused(f"the {spec.what} cannot be enforced: {compiled.get_error()}")
        first = compiled.deep_copy()
        mask = first.compute_bitmask()
        if first.is_error():
            raise GrammarRefused(f"the {spec.what} costs too much: {first.get_error()}")
        if not any(mask):
            raise GrammarRefused(f"nothing satisfies the {spec.what}")

    def _compiled(self, spec: GrammarSpec) -> llguidance.LLMatcher:
        """The spec compiled, for those who ask from now on."""
        compiled = llguidance.LLMatcher(
            self._vocabulary, _grammar(spec), log_level=0, limits=self._limits
        )
        self._check(spec, compiled)
        with self._lock:
            self._cache[spec] = compiled
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return compiled


class GrammarMatcher:
    """The state of one output in its grammar. Used by one thread at a time.

    Matchers of a spec share what its regular expressions have come to, and the limit on that. So
    one that reaches a limit goes on with its spec compiled anew, and fails if its own text leads
    there. take(matcher, token): see _Taker; anew: compiles the spec.

    done: the grammar is complete and nothing but an end token may follow. accepting: an end token
    may come now.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        mask_words: int,
        take: Callable[[llguidance.LLMatcher, int], None],
        anew: Callable[[], llguidance.LLMatcher],
    ):
        self._matcher = matcher
        self._mask_words = mask_words
        self._take = take
        self._anew = anew
        self._taken: list[int] = []

    def fill_mask(self, row: np.ndarray) -> None:
        """Writes which tokens may come next: bit (id % 32) of word (id // 32).

        row: uint32 or int32 [mask_words], contiguous; overwritten. Raises GrammarFailed.
        """
        assert row.shape == (self._mask_words,) and row.itemsize == 4
        assert row.flags.c_contiguous and row.flags.writeable
        address, _ = row.__array_interface__["data"]  # row.ctypes takes as long as a small mask
        self._matcher.unsafe_compute_mask_ptr(address, row.nbytes)
        if self._matcher.is_error():
            self._start_anew()
            self._matcher.unsafe_compute_mask_ptr(address, row.nbytes)
            self._check()

    def advance(self, token: int) -> bool:
        """Takes the token that was chosen. False, and no change, if the grammar forbids it. Raises
        GrammarFailed."""
        self._take(self._matcher, token)
        if self._matcher.is_error():
            self._start_anew()
            if self._matcher.try_consume_tokens([token]) == 0:
                self._check()
                return False
        self._taken.append(token)
        return True

    @property
    def done(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def accepting(self) -> bool:
        return self._matcher.is_accepting()

    def _start_anew(self) -> None:
        self._matcher = self._anew()
        self._matcher.try_consume_tokens(self._taken)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(self._matcher.get_error())


class _Taker:
    """Gives a token to a matcher, and lets other threads run meanwhile: that takes up to a second.

    Of llguidance's ways only the one for several matchers at once does, so there is a second one.
    """

    def __init__(self, vocabulary: llguidance.LLTokenizer):
        self._executor = llguidance.LLExecutor(num_threads=1)
        grammar = llguidance.LLMatcher.grammar_from_regex("a")
        self._second = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        bits = np.frombuffer(self._second.compute_bitmask(), np.uint8)
        self._token = int(np.unpackbits(bits, bitorder="little").argmax())

    def __call__(self, matcher: llguidance.LLMatcher, token: int) -> None:
        second = self._second.deep_copy()
        self._executor.consume_token_par([(matcher, token), (second, self._token)])


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._encode = tokenizer.output_encoder()
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = min(tokenizer.eos_ids)
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace"))


def _grammar(spec: GrammarSpec) -> str:
    """The spec as llguidance takes it."""
    parts = [{**_answer(spec), "name": "answer"}] if spec.kind else []
    if spec.frame:
        parts.insert(0, {"lark_grammar": spec.frame})
    return json.dumps({"grammars": parts})


def _answer(spec: GrammarSpec) -> dict:
    """One of llguidance's grammars, without its name."""
    if spec.kind == "lark":
        return {"lark_grammar": spec.text}
    if spec.kind == "json_schema":
        return {"json_schema": json.loads(spec.text) | schema_options()}
    choices = spec.kind == "choice"
    assert choices or spec.kind == "regex"
    pattern = "|".join(map(_literal, json.loads(spec.text))) if choices else spec.text
    return json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"][0]


def _literal(text: str) -> str:
    """A regular expression that matches just this text."""
    return "".join(
        char if char.isalnum() or ord(char) > 127 else f"\\x{{{ord(char):x}}}" for char in text
    )

"""Grammars compiled for one vocabulary, and the state of one output in its grammar.

llguidance does the work (Earley parsing over derivatives of regular expressions, and a trie of the
vocabulary). It counts what it does and stops at the limits below, so compiling and every mask have
a bounded cost. There are two bounds: what a thread may do that others wait for, and what is done at
all. A grammar that needs more than that is refused, or ends its request alone.
"""

from __future__ import annotations

import collections
import json
import re
import threading
from collections.abc import Callable

import llguidance
import numpy as np

from jaxserve.grammar.spec import GrammarRefused, GrammarSpec, TakesLonger, schema_options
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
# Of one mask at once: 2 ms of whatever grammar, and all that most ever need.
QUICK_LIMITS = LIMITS | {"step_lexer_fuel": 20_000, "step_max_items": 2_000}
CLASSES = {
    r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]",
}  # fmt: skip


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
        self._limits = {
            False: llguidance.LLParserLimits(**QUICK_LIMITS),
            True: llguidance.LLParserLimits(**LIMITS),
        }
        self._take = _Taker(self._vocabulary)
        # By spec and whether it may take long.
        self._cache: collections.OrderedDict[tuple[GrammarSpec, bool], llguidance.LLMatcher] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def matcher(self, spec: GrammarSpec) -> GrammarMatcher:
        """A matcher at the beginning of an output; patient if its first mask takes longer than may
        be done at once. Raises GrammarRefused."""
        compiled, patient = self._cached(spec)
        if compiled is None:
            try:
                compiled = self._compiled(spec, patient=False)
            except _TooMuch:
                compiled, patient = self._compiled(spec, patient=True), True
        anew = lambda: self._compiled(spec, patient=True).deep_copy()
        return GrammarMatcher(compiled.deep_copy(), self.mask_words, patient, self._take, anew)

    def _cached(self, spec: GrammarSpec) -> tuple[llguidance.LLMatcher | None, bool]:
        with self._lock:
            for patient in (False, True):
                compiled = self._cache.get((spec, patient))
                if compiled is not None:
                    self._cache.move_to_end((spec, patient))
                    return compiled, patient
        return None, False

    def _compiled(self, spec: GrammarSpec, *, patient: bool) -> llguidance.LLMatcher:
        """The spec compiled, for those who ask from now on."""
        grammar, limits = _grammar(spec), self._limits[patient]
        compiled = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if compiled.is_error():
            raise GrammarRefused(f"the {spec.what} cannot be enforced: {compiled.get_error()}")
        first = compiled.deep_copy()
        mask = first.compute_bitmask()
        if first.is_error():
            raise _TooMuch(f"the {spec.what} costs too much: {first.get_error()}")
        if not any(mask):
            raise GrammarRefused(f"nothing satisfies the {spec.what}")
        with self._lock:
            self._cache[spec, patient] = compiled
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return compiled


class _TooMuch(GrammarRefused):
    """Its first mask reaches a limit."""


class GrammarMatcher:
    """The state of one output in its grammar. Used by one thread at a time.

    patient: its next mask may take long; set it to go on where TakesLonger was raised. Matchers of
    a spec share what its regular expressions have come to, and the limit on that. So one that
    reaches a limit goes on with its spec compiled anew, and fails if its own text leads there.

    done: the grammar is complete and nothing but an end token may follow. accepting: an end token
    may come now.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        mask_words: int,
        patient: bool,
        take: Callable[[llguidance.LLMatcher, int], None],
        anew: Callable[[], llguidance.LLMatcher],
    ):
        """take(matcher, token): see _Taker; anew(): the spec compiled to take its time."""
        self.patient = patient
        self._matcher = matcher
        self._mask_words = mask_words
        self._take = take
        self._anew = anew
        self._taken: list[int] = []

    def fill_mask(self, row: np.ndarray) -> None:
        """Writes which tokens may come next: bit (id % 32) of word (id // 32).

        row: uint32 or int32 [mask_words], contiguous; overwritten. Raises TakesLonger and
        GrammarFailed.
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
        TakesLonger and GrammarFailed."""
        if self.patient:
            self._take(self._matcher, token)
        else:
            self._matcher.consume_token(token)
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
        if not self.patient:
            raise TakesLonger
        self._matcher = self._anew()
        self._matcher.try_consume_tokens(self._taken)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(self._matcher.get_error())


class _Taker:
    """Gives a token to a patient matcher, and lets other threads run meanwhile.

    Of llguidance's ways only the one for several matchers at once does that, so there is a second
    one.
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
    pattern = "|".join(map(_literal, json.loads(spec.text))) if choices else _ascii(spec.text)
    return json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"][0]


def _ascii(pattern: str) -> str:
    r"""The pattern with \d and \w of ASCII, as in JSON schemas. Rust's are of Unicode: a
    model may be led to a digit that it hardly knows, byte by byte."""
    return re.sub(r"(?s)\\.", lambda escape: CLASSES.get(escape[0], escape[0]), pattern)


def _literal(text: str) -> str:
    """A regular expression that matches just this text."""
    return "".join(
        char if char.isalnum() or ord(char) > 127 else f"\\x{{{ord(char):x}}}" for char in text
    )

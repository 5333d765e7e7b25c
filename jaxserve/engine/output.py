"""Tokens become text: detokenizing, stop strings, log-probabilities, and the deltas clients see.

Runs on the engine thread right after absorb, so a stop string ends its sequence before the next
plan is made. No jax.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.scheduler.plan import StepPlan
from jaxserve.tokenizer.stream import TextStream
from jaxserve.types import (
    FinishReason,
    OutputDelta,
    PromptScores,
    Request,
    RequestRefused,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)

if TYPE_CHECKING:
    from jaxserve.grammar import GrammarMatcher


class _Choice:
    """What the stage keeps of one running choice."""

    def __init__(self, request: Request, tokenizer, matcher: GrammarMatcher | None):
        params = request.params
        self.stream = TextStream(
            tokenizer,
            request.prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
        )
        self.started = False
        self.matcher = matcher
        self.failure: Exception | None = None  # why the grammar cannot go on


class OutputStage:
    """Turns TokenEvents into OutputDeltas. Owned by the engine thread, but for `matchers`.

    vocab_size: columns of the model's logits, which grammars make masks for.
    """

    def __init__(self, tokenizer, vocab_size: int | None = None):
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self._compiler = None  # made with the first grammar: it takes a while
        self._compiler_lock = threading.Lock()
        self._choices: dict[tuple[str, int], _Choice] = {}
        self._scores: dict[str, list[TokenLogprob | None]] = {}

    def matchers(self, params: SamplingParams) -> list[GrammarMatcher]:
        """The state of params.grammar for each choice, to give to EngineCore.add; [] without one.

        Compiles, which may take a while: call it where waiting harms nobody. Any thread may. Raises
        RequestRefused for a grammar that cannot be honoured.
        """
        if params.grammar is None:
            return []
        from jaxserve.grammar import GrammarCompiler, GrammarRefused

        try:
            with self._compiler_lock:
                if self._compiler is None:
                    self._compiler = GrammarCompiler(self.tokenizer, self._vocab_size)
            return [self._compiler.matcher(params.grammar) for _ in range(params.n)]
        except GrammarRefused as error:
            param = "tools" if params.grammar.frame else "response_format"
            raise RequestRefused(str(error), param=param) from None

    def open(self, request: Request, matchers: Sequence[GrammarMatcher] = ()) -> None:
        """Starts tracking a request. matchers: one for each choice, when it has a grammar."""
        for index, matcher in zip(range(request.params.n), matchers or repeat(None)):
            self._choices[request.id, index] = _Choice(request, self.tokenizer, matcher)
        if request.params.prompt_logprobs is not None:
            self._scores[request.id] = [None]  # the first prompt token has nothing before it

    def close(self, request: Request) -> None:
        """Forgets a request that the scheduler refused."""
        for index in range(request.params.n):
            self._choices.pop((request.id, index), None)
        self._scores.pop(request.id, None)

    @property
    def num_open(self) -> int:
        return len(self._choices)

    def process(self, events: list[TokenEvent], scheduler) -> list[tuple[str, OutputDelta]]:
        """Deltas of these events, in order. A stop string found in the text ends its sequence
        through scheduler.finish; later events of an ended sequence are dropped."""
        deltas = []
        for event in events:
            if event.prompt_scores is not None:
                self._add_scores(event.sequence.request, event.prompt_scores)
            if event.token is None and event.finish is None:
                continue
            choice = self._choices.get(event.sequence.id)
            if choice is not None:
                delta = self._isolated(event, choice, scheduler)
                deltas.append((event.sequence.request.id, delta))
        return deltas

    def _isolated(self, event: TokenEvent, choice: _Choice, scheduler) -> OutputDelta:
        """A fault in one sequence's text ends that sequence alone."""
        try:
            return self._delta(event, choice, scheduler)
        except Exception as error:
            sequence = event.sequence
            if sequence.finish is None:
                scheduler.finish(sequence, FinishReason.ERROR)
            del self._choices[sequence.id]
            return OutputDelta(sequence.index, finish_reason=FinishReason.ERROR, error=error)

    def _delta(self, event: TokenEvent, choice: _Choice, scheduler) -> OutputDelta:
        sequence, request = event.sequence, event.sequence.request
        delta = OutputDelta(sequence.index, finish_reason=event.finish)
        if event.token is not None:
            delta.token_ids.append(event.token)
            if event.logprob is not None and request.params.logprobs is not None:
                delta.logprobs = [self._logprob(event, request.params.logprobs)]
            self._add_text(event, choice, delta, scheduler)
            if choice.matcher is not None:
                self._advance(event, choice, delta, scheduler)
        if not choice.started:
            choice.started = True
            delta.num_cached_tokens = sequence.num_cached
            if sequence.index == 0:
                delta.prompt_logprobs = self._scores.pop(request.id, None)
        if delta.finish_reason is not None:
            if choice.stream.stopped is None:
                delta.text += choice.stream.finish()
            delta.stop_reason = sequence.stop_reason
            delta.error = event.error
            delta.pooled = event.pooled
            del self._choices[sequence.id]
        return delta

    def _add_text(self, event, choice, delta, scheduler) -> None:
        sequence, params = event.sequence, event.sequence.request.params
        ended_by_token = event.finish is FinishReason.STOP
        if ended_by_token and not (params.include_stop_str_in_output and sequence.stop_reason):
            return  # an end token is not text
        delta.text = choice.stream.push(event.token)
        if choice.stream.stopped is not None and not ended_by_token:
            if event.finish is None:
                scheduler.finish(sequence, FinishReason.STOP, choice.stream.stopped)
            sequence.stop_reason = choice.stream.stopped
            delta.finish_reason = FinishReason.STOP

    @staticmethod
    def _advance(event, choice, delta, scheduler) -> None:
        """Takes the token into the grammar. When nothing may follow, the choice has ended. Raises
        GrammarFailed, also when the token was sampled without a mask because none could be made."""
        sequence = event.sequence
        if choice.failure is not None:
            raise choice.failure
        if (
            event.finish is FinishReason.STOP
            and event.token in sequence.request.params.stop_token_ids
        ):
            return  # the client's own end, which the grammar need not know
        assert choice.matcher.advance(event.token), "the mask let a forbidden token through"
        if choice.matcher.done:
            if sequence.finish is None:
                scheduler.finish(sequence, FinishReason.STOP)
            delta.finish_reason = FinishReason.STOP

    def fill_masks(self, plan: StepPlan, allowed_SW: np.ndarray) -> None:
        """Writes what rows with a grammar may sample in this plan: a bit for each token id.

        Rows of the plan whose choice has ended since are left alone: nobody reads their token.
        """
        for row in np.flatnonzero(plan.samples_S).tolist():
            choice = self._choices.get(plan.sequences[row].id)
            if choice is not None and choice.matcher is not None:
                try:
                    choice.matcher.fill_mask(allowed_SW[row])
                except Exception as error:  # whatever it is, it ends this choice alone
                    choice.failure = error

    @staticmethod
    def _logprob(event: TokenEvent, count: int) -> TokenLogprob:
        return TokenLogprob(event.token, event.logprob, tuple(event.top[:count]))

    def _add_scores(self, request: Request, scores: PromptScores) -> None:
        """Appends a chunk's scores; a chunk computed again after preemption adds nothing."""
        known, count = self._scores.get(request.id), request.params.prompt_logprobs
        if known is None:
            return
        for i in range(len(known) - scores.start, len(scores.logprob)):
            top = zip(scores.top_ids[i][:count].tolist(), scores.top_logprobs[i][:count].tolist())
            token = request.prompt_ids[scores.start + i]
            known.append(TokenLogprob(token, float(scores.logprob[i]), tuple(top)))

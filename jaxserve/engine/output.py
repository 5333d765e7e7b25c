"""Tokens become text: detokenizing, stop strings, log-probabilities, and the deltas clients see.

Runs on the engine thread right after absorb, so a stop string ends its sequence before the next
plan is made. A token of an output with a grammar is told of when its grammar has taken it, which
may end the output. No jax.
"""

from __future__ import annotations

import threading
from collections import abc
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.engine.masks import Constraint, MaskMaker
from jaxserve.scheduler.plan import StepPlan
from jaxserve.tokenizer.stream import TextStream
from jaxserve.types import (
    FinishReason,
    OutputDelta,
    PromptScores,
    Request,
    RequestRefused,
    SamplingParams,
    Sequence,
    TokenEvent,
    TokenLogprob,
)

if TYPE_CHECKING:
    from jaxserve.grammar import GrammarMatcher


class _Choice:
    """What the stage keeps of one running choice."""

    def __init__(self, request: Request, tokenizer, constraint: Constraint | None):
        params = request.params
        self.stream = TextStream(
            tokenizer,
            request.prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
        )
        self.started = False
        self.constraint = constraint
        self.untold: TokenEvent | None = None  # a token that its grammar is taking
        self.held = False  # nothing is planned until that is told


class OutputStage:
    """Turns TokenEvents into OutputDeltas. Owned by the engine thread, but for `matchers`.

    vocab_size: columns of the model's logits, which grammars make masks for.
    """

    def __init__(self, tokenizer, vocab_size: int | None = None):
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self._compiler = None  # made with the first grammar: it takes a while
        self._compiler_lock = threading.Lock()
        self._masks = MaskMaker()
        self._untold: list[_Choice] = []
        self._left_out: list[tuple[Sequence, _Choice]] = []  # of plans, until their masks are there
        self._num_constrained = 0
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
            field = params.grammar.field
            raise RequestRefused(f"{field}: {error}", code="invalid_grammar", param=field) from None

    def open(self, request: Request, matchers: abc.Sequence[GrammarMatcher] = ()) -> None:
        """Starts tracking a request. matchers: one for each choice, when it has a grammar."""
        words = -(-self._vocab_size // 32)
        constraints = [Constraint(matcher, words) for matcher in matchers]
        self._masks.begin(constraints)
        self._num_constrained += len(constraints)
        for index, constraint in zip(range(request.params.n), constraints or repeat(None)):
            self._choices[request.id, index] = _Choice(request, self.tokenizer, constraint)
        if request.params.prompt_logprobs is not None:
            self._scores[request.id] = [None]  # the first prompt token has nothing before it

    def close(self, request: Request) -> None:
        """Forgets a request that the scheduler refused."""
        for index in range(request.params.n):
            self._forget((request.id, index))
        self._scores.pop(request.id, None)

    def forget_all(self) -> None:
        """Of what is open nothing will be told any more; no thread need go on with it."""
        for sequence_id in list(self._choices):
            self._forget(sequence_id)

    @property
    def num_open(self) -> int:
        return len(self._choices)

    @property
    def has_grammars(self) -> bool:
        return self._num_constrained > 0

    @property
    def waits(self) -> bool:
        """Whether something waits for its grammar: process has more to do, events or not."""
        return bool(self._untold or self._left_out)

    def process(
        self, events: list[TokenEvent], scheduler, patience_s: float = 0.0
    ) -> list[tuple[str, OutputDelta]]:
        """Deltas of these events, in order. A stop string found in the text ends its sequence
        through scheduler.finish; later events of an ended sequence are dropped.

        Tokens go to their grammars first, and are told of last: those that are taken within
        patience_s in this call, the others in a later one.
        """
        for event in events:
            if event.prompt_scores is not None:
                self._add_scores(event.sequence.request, event.prompt_scores)
        deltas = []
        for event in self._give_to_grammars(events):
            choice = self._choices.get(event.sequence.id)
            if choice is not None and choice.untold is not None:  # it ends before that is taken
                deltas.append(self._told(choice, scheduler))
                choice = self._choices.get(event.sequence.id)
            if choice is not None:
                deltas.append(self._isolated(event, choice, scheduler))
        if self._untold:
            self._masks.wait(patience_s)
            taken = [choice for choice in self._untold if not choice.constraint.busy]
            deltas += [self._told(choice, scheduler) for choice in taken if choice.untold]
            self._untold = [choice for choice in self._untold if choice.untold]
        if self._left_out:
            self._release(scheduler)
        return deltas

    def wait(self, seconds: float) -> None:
        """Until some grammar has taken its token, or for so long."""
        self._masks.wait_for_any(seconds)

    def _give_to_grammars(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Sets the threads to work on tokens of outputs with a grammar. Returns the other events
        that there is something to tell of."""
        others, given = [], []
        for event in events:
            choice = self._choices.get(event.sequence.id)
            if choice is None or (event.token is None and event.finish is None):
                continue
            if event.token is None or choice.constraint is None or _is_own_end(event):
                others.append(event)
            elif choice.constraint.failure is not None:  # there was no mask for this token
                event.error = choice.constraint.failure
                others.append(event)
            else:
                assert choice.untold is None, "a token came before its grammar took the last one"
                choice.untold = event
                choice.constraint.give(event.token)
                given.append(choice)
        if given:
            self._untold += given
            self._masks.begin([choice.constraint for choice in given])
        return others

    def _told(self, choice: _Choice, scheduler) -> tuple[str, OutputDelta]:
        """The delta of a token that was with its grammar."""
        event, choice.untold = choice.untold, None
        if choice.held:
            choice.held = False
            scheduler.release(event.sequence)
        return self._isolated(event, choice, scheduler)

    def _release(self, scheduler) -> None:
        """Lets those that were left out of a plan come again when their masks are there."""
        still = []
        for sequence, choice in self._left_out:
            if choice.constraint.wanted and (choice.constraint.busy or choice.untold):
                still.append((sequence, choice))
            else:
                scheduler.release(sequence)
        self._left_out = still

    def _isolated(self, event: TokenEvent, choice: _Choice, scheduler) -> tuple[str, OutputDelta]:
        """A fault in one sequence's text ends that sequence alone."""
        sequence = event.sequence
        try:
            delta = self._delta(event, choice, scheduler)
        except Exception as error:
            if sequence.finish is None:
                scheduler.finish(sequence, FinishReason.ERROR)
            delta = OutputDelta(sequence.index, finish_reason=FinishReason.ERROR, error=error)
        if delta.finish_reason is not None:
            self._forget(sequence.id)
        return sequence.request.id, delta

    def _forget(self, sequence_id: tuple[str, int]) -> None:
        choice = self._choices.pop(sequence_id, None)
        if choice is not None and choice.constraint is not None:
            choice.constraint.wanted = False
            self._num_constrained -= 1

    def _delta(self, event: TokenEvent, choice: _Choice, scheduler) -> OutputDelta:
        sequence, request = event.sequence, event.sequence.request
        delta = OutputDelta(sequence.index, finish_reason=event.finish, error=event.error)
        if event.token is not None:
            if event.error is not None:
                raise event.error
            delta.token_ids.append(event.token)
            if event.logprob is not None and request.params.logprobs is not None:
                delta.logprobs = [self._logprob(event, request.params.logprobs)]
            self._add_text(event, choice, delta, scheduler)
            if choice.constraint is not None and not choice.constraint.busy:
                self._heed_grammar(event, choice.constraint, delta, scheduler)
        if not choice.started:
            choice.started = True
            delta.num_cached_tokens = sequence.num_cached
            if sequence.index == 0:
                delta.prompt_logprobs = self._scores.pop(request.id, None)
        if delta.finish_reason is not None:
            if choice.stream.stopped is None:
                delta.text += choice.stream.finish()
            delta.stop_reason = sequence.stop_reason
            delta.pooled = event.pooled
        return delta

    def _add_text(self, event, choice, delta, scheduler) -> None:
        sequence, params = event.sequence, event.sequence.request.params
        ended_by_token = event.finish is FinishReason.STOP
        if ended_by_token and not params.include_stop_str_in_output:
            return  # an end token is not text
        delta.text = choice.stream.push(event.token)
        if choice.stream.stopped is not None and not ended_by_token:
            if event.finish is None:
                scheduler.finish(sequence, FinishReason.STOP, choice.stream.stopped)
            sequence.stop_reason = choice.stream.stopped
            delta.finish_reason = FinishReason.STOP

    @staticmethod
    def _heed_grammar(event, constraint: Constraint, delta, scheduler) -> None:
        """Ends an output after a token when its grammar allows no other, or cannot go on."""
        if constraint.done:
            delta.finish_reason = FinishReason.STOP
        elif constraint.failure is not None and event.finish is None:
            delta.finish_reason, delta.error = FinishReason.ERROR, constraint.failure
        if delta.finish_reason is not None and event.sequence.finish is None:
            scheduler.finish(event.sequence, delta.finish_reason)

    def fill_masks(
        self, plan: StepPlan, allowed_SW: np.ndarray, scheduler, patience_s: float = 0.0
    ) -> None:
        """Writes what rows with a grammar may sample in this plan: a bit for each token id. Rows
        whose mask is not there within patience_s are left out of it.

        Rows whose choice has ended since are left alone: nobody reads their token.
        """
        self._masks.wait(patience_s)
        for row in np.flatnonzero(plan.samples_S).tolist():
            sequence = plan.sequences[row]
            choice = self._choices.get(sequence.id)
            if choice is None or choice.constraint is None:
                continue
            constraint = choice.constraint
            if constraint.busy or choice.untold:
                scheduler.leave_out(plan, row)
                self._left_out.append((sequence, choice))
            elif constraint.failure is None:
                allowed_SW[row] = constraint.mask_W
                if constraint.slow:  # the next one may take as long
                    scheduler.hold(sequence)
                    choice.held = True

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


def _is_own_end(event: TokenEvent) -> bool:
    """Whether it is an end that the client has named, which a grammar need not know."""
    own = event.sequence.request.params.stop_token_ids
    return event.finish is FinishReason.STOP and event.token in own

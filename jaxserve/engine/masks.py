"""What grammars allow next, worked out without keeping anybody waiting.

A mask takes some twenty microseconds as a rule, and in some grammars, and with ill will, a second.
So the engine thread works out what it can in a moment, and other threads what is left. These are
waited for as long as the device has work anyway, and rows whose mask is not there by then are left
out of the step. Rows whose last mask took long are not waited for at all: they are planned once
their mask is there.
"""

from __future__ import annotations

import concurrent.futures
import heapq
import itertools
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.grammar.spec import TakesLonger

if TYPE_CHECKING:
    from jaxserve.grammar import GrammarMatcher

AT_ONCE_S = 2e-3  # that the engine thread gives to masks in a step; one may end later, a bit
SLOW_S = 2e-3  # of a processor's time


class Constraint:
    """One output's place in its grammar. While busy it belongs to a thread of MaskMaker.

    mask_W: int32, bit (id % 32) of word (id // 32) says whether a token may come next; or done:
    nothing may, the grammar is complete; or failure: why it cannot go on.
    """

    def __init__(self, matcher: GrammarMatcher, mask_words: int):
        self.mask_W = np.empty(mask_words, np.int32)
        self.done = False
        self.failure: Exception | None = None
        self.busy = True  # the first mask is still to be made
        self.wanted = True  # its output has not ended
        self.seconds = 0.0  # of a processor, that the last mask took a thread
        self._matcher = matcher
        self._token: int | None = None  # to be taken

    @property
    def quick(self) -> bool:
        """Whether a mask takes a moment at most, or stops by itself."""
        return not self._matcher.patient

    @property
    def slow(self) -> bool:
        return self.seconds > SLOW_S

    def give(self, token: int) -> None:
        """What was chosen; from here on it is busy."""
        assert not self.busy
        self._token, self.busy = token, True

    def work(self) -> None:
        """Takes the token and sees what may follow. Busy still if that takes longer than a
        moment: the next call takes that long."""
        try:
            if self._token is not None and self.wanted:
                taken = self._matcher.advance(self._token)
                assert taken, "the mask let a forbidden token through"
                self._token = None
            self.done = self._matcher.done
            if self.wanted and not self.done:
                self._matcher.fill_mask(self.mask_W)
        except TakesLonger:
            self._matcher.patient = True
            return
        except Exception as error:  # whatever it is, it ends this choice alone
            self.failure = error
        self.busy = False

    def work_patiently(self) -> None:
        begin = time.thread_time()
        while self.busy:
            self.work()
        self.seconds = time.thread_time() - begin


class MaskMaker:
    """The threads that work for constraints: the engine's own, one for those that take a moment
    more, in turn, and one for the slow ones, the least slow first."""

    def __init__(self):
        pool = concurrent.futures.ThreadPoolExecutor
        self._soon = pool(1, thread_name_prefix="jaxserve-masks")
        self._later = pool(1, thread_name_prefix="jaxserve-slow-masks")
        self._slow: list[tuple[float, int, Constraint]] = []  # a heap
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._awaited: list[Constraint] = []  # since the last wait
        self._news = threading.Event()  # something awaited is done, or something slow

    def begin(self, constraints: Sequence[Constraint]) -> None:
        """Works on those that are busy, for a moment, and hands over the rest."""
        end, left = time.monotonic() + AT_ONCE_S, []
        for constraint in constraints:
            if constraint.quick and time.monotonic() < end:
                constraint.work()
            if not constraint.busy:
                continue
            if constraint.slow:
                self._work_later(constraint)
            else:
                left.append(constraint)
        if left:
            self._awaited += left
            self._soon.submit(self._work, left)

    def wait(self, seconds: float) -> None:
        """Returns when all but the slow ones are done, or after so long; who is late then is not
        waited for again."""
        end = time.monotonic() + seconds
        while any(constraint.busy for constraint in self._awaited):
            left = end - time.monotonic()
            if left <= 0:
                break
            self._news.wait(left)
            self._news.clear()
        self._awaited.clear()

    def wait_for_any(self, seconds: float) -> None:
        """Returns when something is done, at once if it was since the last wait, or after so
        long."""
        self._news.wait(seconds)
        self._news.clear()

    def _work_later(self, constraint: Constraint) -> None:
        with self._lock:
            heapq.heappush(self._slow, (constraint.seconds, next(self._serial), constraint))
        self._later.submit(self._work_on_least)

    def _work(self, constraints: Sequence[Constraint]) -> None:
        for constraint in constraints:
            constraint.work_patiently()
        self._news.set()

    def _work_on_least(self) -> None:
        with self._lock:
            _, _, constraint = heapq.heappop(self._slow)
        constraint.work_patiently()
        self._news.set()

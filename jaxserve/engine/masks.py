"""What grammars allow next, worked out on threads of their own, beside the device and the host.

A mask takes microseconds as a rule, and in some grammars, and with ill will, a second. Nobody but
its own row may wait for such a one: masks are waited for as long as the device has work anyway, and
rows whose mask is not there by then are left out of the step. Those whose last one took long are
not waited for at all: they have a thread of their own, and are planned once their mask is there.
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

if TYPE_CHECKING:
    from jaxserve.grammar import GrammarMatcher

SLOW_S = 2e-3  # of a processor's time; most take a hundredth of it


class Constraint:
    """One output's place in its grammar. While busy it belongs to a thread of MaskMaker.

    mask_W: int32, bit (id % 32) of word (id // 32) says whether a token may come next; or done:
    nothing may, the grammar is complete; or failure: why it cannot go on.
    """

    def __init__(self, matcher: GrammarMatcher, mask_words: int):
        self.mask_W = np.empty(mask_words, np.int32)
        self.done = False
        self.failure: Exception | None = None
        self.busy = False
        self.wanted = True  # its output has not ended
        self.seconds = 0.0  # of a processor, that the last mask took
        self._matcher = matcher

    @property
    def slow(self) -> bool:
        return self.seconds > SLOW_S

    def work(self, token: int | None) -> None:
        """Takes the token that was chosen, None at the beginning, and sees what may follow."""
        begin = time.thread_time()
        try:
            if not self.wanted:
                return
            if token is not None:
                taken = self._matcher.advance(token)
                assert taken, "the mask let a forbidden token through"
            self.done = self._matcher.done
            if not self.done:
                self._matcher.fill_mask(self.mask_W)
        except Exception as error:  # whatever it is, it ends this choice alone
            self.failure = error
        finally:
            self.seconds = time.thread_time() - begin
            self.busy = False


Job = tuple[Constraint, int | None]  # with the token to take


class MaskMaker:
    """Two threads that work for constraints: one for the quick ones, in turn, and one for the slow
    ones, the least slow first. The engine thread owns everything else."""

    def __init__(self):
        pool = concurrent.futures.ThreadPoolExecutor
        self._quick = pool(1, thread_name_prefix="jaxserve-masks")
        self._slow = pool(1, thread_name_prefix="jaxserve-slow-masks")
        self._slow_jobs: list = []  # a heap
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._awaited: list[Constraint] = []  # quick ones begun since the last wait
        self._news = threading.Event()  # quick ones are done, or a slow one

    def begin(self, jobs: Sequence[Job]) -> None:
        """Sets the threads to work; returns at once."""
        quick = []
        for constraint, token in jobs:
            assert not constraint.busy
            constraint.busy = True
            if not constraint.slow:
                quick.append((constraint, token))
                continue
            with self._lock:
                entry = (constraint.seconds, next(self._serial), constraint, token)
                heapq.heappush(self._slow_jobs, entry)
            self._slow.submit(self._work_slowly)
        if quick:
            self._awaited += [constraint for constraint, _ in quick]
            self._quick.submit(self._work, quick)

    def wait(self, seconds: float) -> None:
        """Returns when the quick ones are done, or after so long; who is late then is not waited
        for again."""
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

    def _work(self, jobs: Sequence[Job]) -> None:
        for constraint, token in jobs:
            constraint.work(token)
        self._news.set()

    def _work_slowly(self) -> None:
        with self._lock:
            _, _, constraint, token = heapq.heappop(self._slow_jobs)
        constraint.work(token)
        self._news.set()

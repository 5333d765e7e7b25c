"""AsyncEngine: one engine thread behind an asyncio door.

Any number of coroutines call generate(); the engine thread drains their requests from an inbox,
steps the core, and wakes each event loop once a step with everything that is new for it.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import pathlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence

from jaxserve.config import EngineConfig
from jaxserve.engine.core import EngineCore, EngineStats, Observer
from jaxserve.scheduler.stats import Standing
from jaxserve.types import (
    EngineFailed,
    EngineStopped,
    FinishReason,
    OutputDelta,
    Request,
    RequestRefused,
    SamplingParams,
    token_ids,
)

_COMPILING_THREADS = 2  # for grammars; one may take a processor for a second
_STUCK_AFTER_S = 120.0  # work waiting and no step done for so long: the device is stuck


@dataclasses.dataclass(frozen=True)
class Health:
    """state: starting, ready, draining, stuck (work waits and no step ends) or dead."""

    state: str
    seconds_since_step: float
    message: str = ""


class _Stream:
    """One request's deltas on their way from the engine thread to a coroutine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_choices: int):
        self.loop = loop
        self.open_choices = num_choices  # as the coroutine has seen
        self.unfinished = num_choices  # as the engine thread has seen
        self.deltas: list[OutputDelta] = []
        self.error: Exception | None = None
        self._news: asyncio.Future | None = None  # awaited; an Event would cost twice as much

    def put(self, delta: OutputDelta) -> None:
        """Called on the loop's own thread."""
        self.deltas.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def take(self) -> list[OutputDelta]:
        """Everything new; waits until there is something. Raises the error that ended it."""
        while not self.deltas:
            if self.error is not None:
                raise self.error
            self._news = self.loop.create_future()
            await self._news
        taken, self.deltas = self.deltas, []
        self.open_choices -= sum(delta.finish_reason is not None for delta in taken)
        return taken


class AsyncEngine:
    """Generates for many coroutines at once. Make one with start() or from an EngineCore."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer,
        *,
        config: EngineConfig,
        model_name: str = "model",
        hidden_size: int = 0,
        memory_table=None,
        description: str = "",
        warm_up: Callable[[], None] = lambda: None,
        manifest: dict | None = None,
        trace: Callable[[pathlib.Path, float], None] | None = None,
    ):
        """warm_up runs first on the engine thread; until it is done the state is "starting" and
        requests wait. trace(folder, seconds): watches the device for so long."""
        self.config = config
        self.core = core
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_model_len = config.max_model_len
        self.vocab_size = tokenizer.vocab_size
        self.hidden_size = hidden_size  # of what pooling gives
        self.memory_table = memory_table
        self.description = description
        self.manifest = manifest or {}
        self._warm_up = warm_up
        self._trace = trace
        self._compiling = concurrent.futures.ThreadPoolExecutor(
            _COMPILING_THREADS, thread_name_prefix="jaxserve-grammars"
        )
        self._streams: dict[str, _Stream] = {}  # engine thread only
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = threading.Condition()
        self._state = "starting"
        self._settled = threading.Event()  # warm, or failed
        self._failure = ""
        self._ended = False  # set under _wake when the engine thread stops reading its inbox
        self._idle_since = core.clock()
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()
        # Python's end would stop the thread anywhere, in native code with an abort.
        atexit.register(self.shutdown)

    @classmethod
    def start(cls, config: EngineConfig, *, progress=None) -> AsyncEngine:
        """Loads, compiles and starts; blocks until the engine can serve. Raises ValueError with
        the remedy when the model or the settings will not do."""
        from jaxserve.engine.start import build  # only here: what it needs imports jax

        parts = build(config, clock=time.monotonic, progress=progress)
        engine = cls.from_parts(parts)
        engine.wait_until_ready()
        return engine

    @classmethod
    def from_parts(cls, parts) -> AsyncEngine:
        """An engine of what engine.start.build made; returns while it still warms up."""
        return cls(
            parts.core,
            parts.tokenizer,
            config=parts.config,
            model_name=parts.model_name,
            hidden_size=parts.model.config.hidden_size,
            memory_table=parts.memory_table,
            description=parts.description,
            warm_up=parts.warm_up,
            manifest=parts.manifest,
            trace=parts.trace,
        )

    def wait_until_ready(self) -> None:
        """Blocks until the programs are compiled. Raises EngineFailed when that failed."""
        self._settled.wait()
        if self._ended:
            raise self._end()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        tenant: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> AsyncIterator[list[OutputDelta]]:
        """Yields the news of the request's choices until all have finished.

        Closing the iterator, or cancelling the task, aborts the request. Raises RequestRefused
        before the first delta, EngineFailed when a device step failed under it or the engine ended.
        """
        now = self.core.clock()
        if self._state not in ("starting", "ready"):
            raise RequestRefused(f"the engine is {self._state}", code="shutting_down")
        if self._ended:
            raise self._end()
        request = Request(
            id=request_id or secrets.token_hex(8),
            prompt_ids=token_ids(prompt_ids),
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            tenant=tenant,
            priority=priority,
            arrival=now,
            deadline=None if timeout_s is None else now + timeout_s,
            cache_salt=cache_salt,
        )
        matchers = []
        if params.grammar is not None:
            loop = asyncio.get_running_loop()
            matchers = await loop.run_in_executor(
                self._compiling, self.core.output.matchers, params
            )
        stream = _Stream(asyncio.get_running_loop(), params.n)
        self._post(lambda: self._add(request, matchers, stream))
        if self._ended:  # it ended in between: nobody will read the inbox
            raise self._end()
        try:
            while stream.open_choices > 0:
                deltas = await stream.take()
                for delta in deltas:
                    if delta.finish_reason is FinishReason.ERROR:
                        raise delta.error or EngineFailed("the request failed in the engine")
                yield deltas
        finally:
            if stream.open_choices > 0 and stream.error is None:
                self.abort(request.id)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees what it holds. Harmless for one that has ended."""
        self._post(lambda: self._deliver(self.core.abort(request_id)))

    async def profile(self, folder: pathlib.Path, seconds: float) -> None:
        """Writes a trace of the device's next seconds into a new folder. One at a time."""
        await asyncio.to_thread(self._trace, folder, seconds)

    def stats(self) -> EngineStats:
        """Gauges and counters, as of now."""
        return self.core.stats()

    def standings(self) -> list[Standing]:
        """Who has had how much service, of the tenants that have something here."""
        return self.core.scheduler.standings()

    def retry_after(self) -> float:
        """Seconds after which a request that a full queue refuses now may come again."""
        return self.core.scheduler.retry_after(self.core.clock())

    def observe(self, observer: Observer) -> None:
        """observer is told of each step from now on, on the engine thread."""
        self.core.observers.append(observer)

    def health(self) -> Health:
        waiting = self.core.clock() - max(self.core.last_step, self._idle_since)
        if not self._thread.is_alive() and self._state != "stopped":
            return Health("dead", waiting, self._failure or "the engine thread has ended")
        if self._state != "starting" and self.core.has_work and waiting > _STUCK_AFTER_S:
            return Health("stuck", waiting, f"no step has finished for {waiting:.0f} s")
        return Health(self._state, waiting)

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the running ones. True when all have ended."""
        self._state = "draining"
        end = time.monotonic() + timeout_s
        with self._wake:
            while self._busy() and time.monotonic() < end and self._thread.is_alive():
                self._wake.wait(0.05)
        return not self._busy()

    def shutdown(self) -> None:
        """Ends the engine thread. Requests still open end with an error."""
        self._state = "stopped"
        with self._wake:
            self._wake.notify_all()
        self._thread.join(timeout=60)
        atexit.unregister(self.shutdown)

    # ---- engine thread ------------------------------------------------------------------------

    def _post(self, job: Callable[[], None]) -> None:
        with self._wake:
            if self._ended:
                return
            self._inbox.append(job)
            self._wake.notify_all()

    def _end(self) -> EngineFailed:
        """What to tell of an engine that has ended."""
        if self._failure:
            return EngineFailed(self._failure)
        return EngineStopped("the engine has shut down")

    def _busy(self) -> bool:
        return bool(self._inbox) or self.core.has_work

    def _run(self) -> None:
        try:
            self._warm_up()
            self._idle_since = self.core.clock()
            if self._state == "starting":
                self._state = "ready"
            self._settled.set()
            while self._state != "stopped":
                self._wait_for_work()
                self._take_in()
                if self.core.has_work:
                    self._deliver(self.core.step())
        except BaseException as error:
            self._failure = f"the engine thread failed: {type(error).__name__}: {error}"
            logging.getLogger("jaxserve").exception("the engine thread failed")
        finally:
            self._fail_streams(self._end())
            self._settled.set()

    def _wait_for_work(self) -> None:
        with self._wake:
            if self._busy() or self._state == "stopped":
                return
            self._wake.notify_all()  # drain() waits for this
            while not self._busy() and self._state != "stopped":
                self._wake.wait()
            self._idle_since = self.core.clock()

    def _take_in(self) -> None:
        """Does what the inbox asks, and what comes in until the next step is to be planned."""
        while True:
            while self._inbox:
                self._inbox.popleft()()
            left_s = self.core.plan_due() - self.core.clock()
            if left_s <= 0:
                return
            with self._wake:
                if not self._inbox:
                    self._wake.wait(left_s)
            if self._state == "stopped":
                return

    def _add(self, request: Request, matchers, stream: _Stream) -> None:
        if request.id in self._streams:
            error = RequestRefused(f"request id {request.id!r} is in use", param="request_id")
        else:
            try:
                self.core.add(request, matchers)
                self._streams[request.id] = stream
                return
            except Exception as raised:
                error = raised
        _call(stream.loop, stream.fail, error)

    def _deliver(self, outputs: list[tuple[str, OutputDelta]]) -> None:
        """Hands a step's deltas over, waking each event loop once."""
        by_loop = collections.defaultdict(list)
        ended = collections.Counter()
        for request_id, delta in outputs:
            stream = self._streams.get(request_id)
            if stream is not None:
                by_loop[stream.loop].append((stream, delta))
                ended[request_id] += delta.finish_reason is not None
        for request_id, count in ended.items():
            stream = self._streams[request_id]
            stream.unfinished -= count
            if stream.unfinished == 0:
                del self._streams[request_id]
        for loop, news in by_loop.items():
            _call(loop, _put_all, news)

    def _fail_streams(self, error: Exception) -> None:
        with self._wake:
            self._ended = True
            left, self._inbox = self._inbox, collections.deque()
        for job in left:  # registers the streams of requests nobody has seen yet
            with contextlib.suppress(Exception):
                job()
        for stream in self._streams.values():
            _call(stream.loop, stream.fail, error)
        self._streams.clear()
        self.core.output.forget_all()


def _put_all(news: list[tuple[_Stream, OutputDelta]]) -> None:
    for stream, delta in news:
        stream.put(delta)


def _call(loop: asyncio.AbstractEventLoop, function, *args) -> None:
    """Runs function on the loop's thread; a loop that has closed has nobody left to tell."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        assert loop.is_closed()

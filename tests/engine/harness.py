"""A whole engine on a tiny model, without a tokenizer: ids in, ids out."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from jaxserve import models
from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.engine.core import EngineCore
from jaxserve.engine.output import OutputStage
from jaxserve.engine.runner import Runner, RunnerShape
from jaxserve.engine.step import StepSpec
from jaxserve.grammar import GrammarSpec
from jaxserve.grammar.compiler import GrammarFailed
from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import Request, SamplingParams

VOCAB = 384
MAX_LEN = 256
HOST_PAGES = 20  # of every runner; the scheduler uses as many as a test says


class IdTokenizer:
    """Stands in where text does not matter: token i is the text 'i '."""

    vocab_size = VOCAB
    drops_first_space = False
    _table = tuple(f"{i} ".encode() for i in range(VOCAB))

    def table(self, skip_special_tokens=True):
        return self._table


@functools.cache
def load(folder, attention: str, linear: str, stacked: bool, weights="float32", dtype="float32"):
    backend = models.Backend(attention=attention, linear=linear, stacked=stacked)
    return models.load(folder, weight_dtype=weights, dtype=dtype, backend=backend)


@functools.cache
def runner_for(
    folder,
    backend,
    num_slots,
    bucket,
    num_pages,
    page_size,
    deterministic,
    kv_dtype=None,
) -> Runner:
    """Compiled once for each shape; reset() between engines."""
    model = load(folder, *backend)
    shape = RunnerShape(
        num_slots=num_slots,
        token_budget=bucket,
        max_model_len=MAX_LEN,
        num_pages=num_pages,
        kv_spec=model.config.kv_spec(page_size, jnp.dtype(kv_dtype or model.config.dtype)),
        deterministic=deterministic,
        host_pages=HOST_PAGES,
    )
    spec = StepSpec(model.family, model.config, model.config.backend.attention, VOCAB)
    runner = Runner(spec, model.params, shape, frozenset())
    runner.compile()
    return runner


class Clock:
    """Time that moves by one second a reading."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make_core(
    folder,
    *,
    backend=("reference", "reference", True),
    num_slots=8,
    slots=None,
    bucket=64,
    budget=None,
    num_pages=160,
    page_size=16,
    pool_pages=None,
    host_pages=0,
    kv_dtype=None,
    pipelined=True,
    deterministic=True,
    eos_ids=(),
    runner=None,
    scheduling=None,
    **settings,
) -> EngineCore:
    """num_slots, bucket and num_pages are what the programs are compiled for; slots, budget,
    pool_pages and host_pages what the scheduler uses of them, so that many settings share few
    programs."""
    assert host_pages <= HOST_PAGES
    compiled = runner or runner_for(
        folder,
        backend,
        num_slots,
        bucket,
        num_pages,
        page_size,
        deterministic,
        kv_dtype,
    )
    if runner is None:
        compiled.reset()
    config = EngineConfig(
        num_slots=slots or num_slots,
        token_budget=budget or bucket,
        num_pages=pool_pages or num_pages,
        page_size=page_size,
        max_model_len=MAX_LEN,
        **settings,
    )
    limits = Limits.of_engine(config, eos_ids, VOCAB)
    limits = dataclasses.replace(limits, host_pages=host_pages)
    scheduler = Scheduler(limits, scheduling or SchedulerConfig(), cache_key=b"test")
    return EngineCore(scheduler, compiled, OutputStage(IdTokenizer()), Clock(), pipelined=pipelined)


@dataclasses.dataclass
class Answer:
    """What one choice got."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: Exception | None = None
    cached: int = 0
    prompt_logprobs: list | None = None
    pooled: object = None  # float32 [D]


def collect(core: EngineCore, answers: dict, outputs) -> None:
    for request_id, delta in outputs:
        answer = answers.setdefault((request_id, delta.index), Answer())
        assert answer.finish is None, "news of a choice that has ended"
        answer.tokens += delta.token_ids
        answer.logprobs += delta.logprobs or []
        answer.text += delta.text
        answer.cached = max(answer.cached, delta.num_cached_tokens)
        answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
        answer.error = delta.error
        answer.pooled = delta.pooled
        answer.finish = delta.finish_reason


def run(core: EngineCore, requests, *, arrivals=None, between=None, matchers=None) -> dict:
    """Runs requests to their ends; {(id, choice): Answer}. arrivals: step each one comes at.

    matchers: {request id: its choices' grammar matchers}.

    between(core, step): called before each step. Leaves the core idle, with nothing held.
    """
    arrivals = arrivals or [0] * len(requests)
    waiting = sorted(zip(arrivals, range(len(requests))), reverse=True)
    answers, step = {}, 0
    while waiting or core.has_work:
        while waiting and waiting[-1][0] <= step:
            arrived = requests[waiting.pop()[1]]
            core.add(arrived, (matchers or {}).get(arrived.id, ()))
        if between:
            collect(core, answers, between(core, step) or [])
        collect(core, answers, core.step())
        core.scheduler.check_invariants()
        step += 1
        assert step < 20_000, "the engine does not come to an end"
    assert core.output.num_open == 0
    stats = core.scheduler.stats()
    assert stats.pages_free == stats.pages_total and stats.running == stats.waiting == 0
    return answers


class Multiples:
    """A grammar's matcher: allows multiples of the count of tokens so far plus three; complete
    after `length`. fails_at: the token after which no mask can be made."""

    def __init__(self, length, fails_at=None, patient=False):
        self.patient = patient  # see GrammarMatcher
        self.length, self.fails_at, self.count = length, fails_at, 0

    @property
    def allowed(self):
        return np.arange(VOCAB) % (self.count + 3) == 0

    @property
    def done(self):
        return self.count == self.length

    def fill_mask(self, row):
        if self.count == self.fails_at:
            raise GrammarFailed("a limit was reached")
        row[:] = np.packbits(self.allowed, bitorder="little").view(np.int32)

    def advance(self, token):
        fits = bool(self.allowed[token])
        self.count += 1
        return fits


def constrained(name, prompt_ids=(5, 6, 7), **params) -> Request:
    """A request with a grammar; which one it is, its matchers say."""
    return request(name, prompt_ids, grammar=GrammarSpec.choice(["any"]), max_tokens=20, **params)


def request(name, prompt_ids, **params) -> Request:
    seed = params.get("seed") or 0
    params = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **params}
    return Request(str(name), tuple(prompt_ids), SamplingParams(**params), seed=seed)

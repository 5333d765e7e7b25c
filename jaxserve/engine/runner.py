"""The table of compiled step programs, and the two verbs the loop uses: dispatch and fetch.

Programs are compiled before the first request, one for each bucket of T times {greedy, sampled}.
A compiled program cannot compile again: a wrong shape or dtype raises. Building the table is the
warm-up.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import numpy as np

from jaxserve.engine import pack
from jaxserve.engine.state import DeviceState, StepOutputs, init_state, row_settings, set_row
from jaxserve.engine.step import StepSpec, device_step
from jaxserve.pallas_kernels.ragged_paged_attention import api as attention
from jaxserve.scheduler.plan import StepPlan
from jaxserve.types import PromptScores, SamplingParams, StepResult


@dataclasses.dataclass(frozen=True)
class RunnerShape:
    """The fixed sizes every program is compiled for."""

    num_slots: int
    token_budget: int
    max_model_len: int
    num_pages: int
    kv_spec: attention.KVSpec
    deterministic: bool = False

    @property
    def max_pages(self) -> int:
        """Pages of the longest row."""
        return -(-self.max_model_len // self.kv_spec.page_size)

    @property
    def buckets(self) -> tuple[int, ...]:
        """T of each program: powers of four from 1, and the budget. Deterministic pins one.

        Steps of four bound padding where it is cheap (attention and the native matmul skip it) and
        halve the number of programs against steps of two.
        """
        largest = 1 << (self.token_budget - 1).bit_length()
        if self.deterministic:
            return (largest,)
        sizes = [1]
        while sizes[-1] * 4 < largest:
            sizes.append(sizes[-1] * 4)
        return (*sizes, largest) if largest > 1 else (1,)


@dataclasses.dataclass
class Pending:
    """A dispatched step; its outputs are on their way to the host."""

    plan: StepPlan
    outputs: StepOutputs


class _CompileCounter:
    """Counts XLA compilations of the process, by jax's own monitoring events."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration: float, **_) -> None:
        self.count += event == self._EVENT


_compile_counter = _CompileCounter()  # listeners cannot be removed, so there is one


class Runner:
    """Owns the parameters, the device state and the compiled programs of one engine.

    Not thread safe: one engine thread calls it.
    """

    def __init__(self, spec: StepSpec, params, shape: RunnerShape, end_ids):
        self.spec = spec
        self.shape = shape
        self.end_ids = end_ids
        self.params = params
        self.rows = pack.RowParams(shape.num_slots)
        self.programs: dict[tuple[int, bool], jax.stages.Compiled] = {}
        self.compile_seconds: dict[str, float] = {}
        self.state: DeviceState | None = None
        self._set_row: jax.stages.Compiled | None = None
        self._warm_count: int | None = None
        self.reset()

    @property
    def compilations(self) -> int:
        """Programs this process compiled since the table was built; anything but 0 is a fault."""
        return 0 if self._warm_count is None else _compile_counter.count - self._warm_count

    def reset(self) -> None:
        """A new, empty device state: at start, and after a failed step lost the donated one."""
        self.state = None  # free the old pool before the new one is made
        kv_pages = attention.init_kv_pages(
            self.shape.kv_spec, self.shape.num_pages, self.spec.attention_backend
        )
        self.state = init_state(
            kv_pages, self.shape.num_slots, self.shape.max_model_len, self.spec.num_tokens
        )

    def compile(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Builds the table, smallest bucket first, two programs at a time.

        progress(name, done, total) is called as programs finish.
        """
        specs = [(t, sampled) for t in self.shape.buckets for sampled in (False, True)]
        jobs = {"set_row": self._compile_set_row}
        for bucket_T, sampled in specs:
            name = f"step T={bucket_T} {'sampled' if sampled else 'greedy'}"
            jobs[name] = functools.partial(self._compile_step, bucket_T, sampled)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            futures = {pool.submit(self._timed, name, job): name for name, job in jobs.items()}
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                future.result()
                if progress:
                    progress(futures[future], done, len(jobs))
        self._warm_count = _compile_counter.count

    def _timed(self, name, job):
        start = time.monotonic()
        job()
        self.compile_seconds[name] = time.monotonic() - start

    def _compile_step(self, bucket_T: int, sampled: bool) -> None:
        step = functools.partial(device_step, spec=self.spec)
        specs = _shapes((self.params, self.state, self._empty_inputs(bucket_T, sampled)))
        jitted = jax.jit(step, donate_argnums=1)
        self.programs[bucket_T, sampled] = jitted.lower(*specs).compile()

    def _compile_set_row(self) -> None:
        row = row_settings((), SamplingParams(), (), self.shape.max_model_len, self.spec.num_tokens)
        specs = _shapes((self.state, np.int32(0), row))
        self._set_row = jax.jit(set_row, donate_argnums=0).lower(*specs).compile()

    def _empty_inputs(self, bucket_T: int, sampled: bool):
        """Inputs of the bucket's shapes with no rows in it."""
        none = np.zeros(0, np.int32)
        plan = StepPlan(
            step=0,
            sequences=(),
            slot_S=none,
            generation_S=none,
            start_S=none,
            cu_q_len_S1=np.zeros(1, np.int32),
            samples_S=np.zeros(0, bool),
            token_ids_T=none,
            page_table_SP=np.zeros((0, self.shape.max_pages), np.int32),
            num_decode=0,
        )
        num_slots, max_pages = self.shape.num_slots, self.shape.max_pages
        return pack.pack(plan, self.rows, bucket_T, num_slots, max_pages, sampled=sampled)

    def dispatch(self, plan: StepPlan) -> Pending:
        """Sends one step to the device and returns at once.

        Any exception here or in fetch means the donated state may be gone: call reset().
        """
        for slot, sequence in plan.admits:
            self._admit(slot, sequence)
        bucket_T = next(t for t in self.shape.buckets if t >= plan.num_tokens)
        inputs = pack.pack(plan, self.rows, bucket_T, self.shape.num_slots, self.shape.max_pages)
        program = self.programs[bucket_T, inputs.sampling is not None]
        self.state, outputs = program(self.params, self.state, inputs)
        for array in jax.tree.leaves(outputs):
            array.copy_to_host_async()
        return Pending(plan, outputs)

    def _admit(self, slot: int, sequence) -> None:
        self.rows.admit(slot, sequence)
        params = sequence.request.params
        if params.penalised or params.logit_bias or params.min_tokens:
            length, vocab_size = self.shape.max_model_len, self.spec.num_tokens
            row = row_settings(sequence.tokens, params, self.end_ids, length, vocab_size)
            self.state = self._set_row(self.state, np.int32(slot), row)

    def fetch(self, pending: Pending) -> StepResult:
        """Waits for a step's tokens. Row r of the result is row r of its plan."""
        plan, out = pending.plan, pending.outputs
        rows = plan.num_rows
        token_S = np.asarray(out.token_S)[:rows]
        if out.logprob_S is None:
            return StepResult(token_S)
        return StepResult(
            token_S,
            np.asarray(out.logprob_S)[:rows],
            np.asarray(out.top_ids_SK)[:rows],
            np.asarray(out.top_logprobs_SK)[:rows],
            self._prompt_scores(plan, out),
        )

    def _prompt_scores(self, plan, out) -> dict[int, PromptScores]:
        """Scores of the prompt tokens that follow each computed position, by row."""
        found = {}
        for row, sequence in enumerate(plan.sequences):
            start = int(plan.start_S[row])
            wanted = sequence.request.params.prompt_logprobs is not None and sequence.index == 0
            first, last = plan.cu_q_len_S1[row], plan.cu_q_len_S1[row + 1]
            count = min(int(last - first), sequence.num_prompt - 1 - start)
            if wanted and count > 0:
                part = slice(first, first + count)
                found[row] = PromptScores(
                    start + 1,
                    np.asarray(out.prompt_logprob_T)[part],
                    np.asarray(out.prompt_top_ids_TK)[part],
                    np.asarray(out.prompt_top_logprobs_TK)[part],
                )
        return found


def _shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

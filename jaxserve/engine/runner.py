"""The table of compiled step programs, and the verbs the loop uses: dispatch, constrain, fetch.

Programs are compiled before the first request: for each bucket of T one for greedy rows and one
that stops at the logits, and for each number of rows two that choose tokens from them: the best
that masks allow, and whatever rows may ask for. A compiled program cannot compile again: a wrong
shape or dtype raises. Building the table is the warm-up.
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
from jaxserve.engine.host_kv import HostKV
from jaxserve.engine.state import (
    ChoiceInputs,
    DeviceState,
    ReadingInputs,
    Scores,
    init_state,
    row_settings,
    set_row,
)
from jaxserve.engine.step import StepSpec, best_step, choose_step, greedy_step, score_step
from jaxserve.engine.wire import Wire
from jaxserve.pallas_kernels.ragged_paged_attention import api as attention
from jaxserve.scheduler.limits import step_sizes
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
    host_pages: int = 0  # pages of host memory for the KV of preempted sequences

    @property
    def max_pages(self) -> int:
        """Pages of the longest row."""
        return -(-self.max_model_len // self.kv_spec.page_size)

    @property
    def buckets(self) -> tuple[int, ...]:
        """T of each program. Deterministic pins one."""
        sizes = step_sizes(self.token_budget)
        return sizes[-1:] if self.deterministic else sizes


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step, or half of one, and how its inputs travel."""

    wire: Wire
    compiled: jax.stages.Compiled


@dataclasses.dataclass
class Pending:
    """A dispatched step; what of its outputs the host will read is on its way."""

    plan: StepPlan
    token_S: jax.Array | None = None  # None while the device waits for masks
    logprobs: tuple[jax.Array, ...] | None = None  # of the chosen and the best tokens, by row
    prompt_logprobs: tuple[jax.Array, ...] | None = None  # of the prompt's tokens, by token
    pooled_SD: jax.Array | None = None
    waiting: tuple[jax.Array, ChoiceInputs] | None = None  # the logits that masks are to come for


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
        self._all_allowed = np.full((shape.num_slots, _mask_words(spec)), -1, np.int32)
        self._allowed = {}  # on the device, by rows: what steps without a grammar are given
        self.programs: dict[tuple[int, bool], Program] = {}  # by (T, whether it stops at logits)
        self.choosers: dict[tuple[int, bool], Program] = {}  # by (rows, whether all take the best)
        self.compile_seconds: dict[str, float] = {}
        self.state: DeviceState | None = None
        self._host_kv: HostKV | None = None
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
            kv_pages,
            self.shape.num_slots,
            self.shape.max_model_len,
            self.spec.num_tokens,
            self.spec.model_config.hidden_size,
        )

    def compile(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Builds the table, smallest bucket first, two programs at a time.

        progress(name, done, total) is called as programs finish.
        """
        jobs = {"set_row": self._compile_set_row}
        if self.shape.host_pages:
            jobs["copies to and from the host"] = self._compile_host_copies
        for rows in sorted({min(self.shape.num_slots, t) for t in self.shape.buckets}):
            for takes_best, name in ((True, "best"), (False, "drawn")):
                job = functools.partial(self._compile_choice, rows, takes_best)
                jobs[f"choice of {rows} {name}"] = job
        for bucket_T in self.shape.buckets:
            for sampled, name in ((False, "greedy"), (True, "logits")):
                job = functools.partial(self._compile_step, bucket_T, sampled)
                jobs[f"step T={bucket_T} {name}"] = job
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            futures = {pool.submit(self._timed, name, job): name for name, job in jobs.items()}
            try:
                for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                    future.result()
                    if progress:
                        progress(futures[future], done, len(jobs))
            except BaseException:  # Ctrl-C, or no memory: the others take minutes and help nobody
                pool.shutdown(cancel_futures=True)
                raise
        self._warm_count = _compile_counter.count

    def _timed(self, name, job):
        start = time.monotonic()
        job()
        self.compile_seconds[name] = time.monotonic() - start

    def _compile_step(self, bucket_T: int, sampled: bool) -> None:
        step = bucket_step(self.spec, self.shape, bucket_T, sampled)
        # Parameters stay as they lie: one may have an order in memory of its own.
        as_placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.format)
        params = jax.tree.map(as_placed, self.params)
        self.programs[bucket_T, sampled] = self._compile(step, params)

    def _compile_choice(self, rows: int, takes_best: bool) -> None:
        step = choice_step(self.spec, rows, takes_best)
        self.choosers[rows, takes_best] = self._compile(step)

    def _compile(self, step: Step, *before) -> Program:
        jitted = jax.jit(step.run, donate_argnums=len(before))
        lowered = jitted.lower(*before, _shapes(self.state), *step.inputs)
        options = compiler_options(jax.local_devices()[0].device_kind)
        return Program(step.wire, lowered.compile(compiler_options=options))

    def _compile_host_copies(self) -> None:
        self._host_kv = HostKV(self.state.kv_pages, self.shape.host_pages)

    def _compile_set_row(self) -> None:
        row = row_settings((), SamplingParams(), (), self.shape.max_model_len, self.spec.num_tokens)
        specs = _shapes((self.state, np.int32(0), row))
        self._set_row = jax.jit(set_row, donate_argnums=0).lower(*specs).compile()

    def dispatch(self, plan: StepPlan) -> Pending:
        """Sends one step to the device and returns at once.

        A step with rows that sample under a grammar goes as far as their logits; constrain sends
        the rest. Any exception in these or in fetch means that the donated state may be gone: call
        reset().
        """
        self._copy_pages(plan)
        for slot, sequence in plan.admits:
            self._admit(slot, sequence)
        bucket_T = next(t for t in self.shape.buckets if t >= plan.size)
        inputs, choice = pack.pack(
            plan, self.rows, bucket_T, self.shape.num_slots, self.shape.max_pages
        )
        program = self.programs[bucket_T, choice is not None]
        self.state, outputs = program.compiled(self.params, self.state, program.wire.pack(inputs))
        if choice is None:
            pending = Pending(plan, outputs.token_S)
            _send_back(pending)
            return pending
        pending = self._pending_choice(plan, inputs.reading, choice, outputs)
        if not (self.rows.grammar[plan.slot_S] & plan.samples_S).any():
            self._choose(pending, self._all_allowed_on_device(len(choice.slot_S)))
        return pending

    def constrain(self, pending: Pending, fill_masks: Callable[..., None]) -> None:
        """Sends what dispatch has left of a step with grammars; of others nothing is left.

        fill_masks(plan, allowed_SW): writes the bits of the tokens that rows with a grammar may
        take next, which takes the tokens of the step before.
        """
        if pending.waiting is not None:
            allowed_SW = self._all_allowed[: len(pending.waiting[1].slot_S)].copy()
            fill_masks(pending.plan, allowed_SW)
            self._choose(pending, allowed_SW)

    def _copy_pages(self, plan: StepPlan) -> None:
        """KV of preempted sequences to the host, then that of returning ones back."""
        if plan.swap_out:
            self._host_kv.keep(self.state.kv_pages, plan.swap_out)
        if plan.swap_in:
            restored = self._host_kv.restore(self.state.kv_pages, plan.swap_in)
            self.state = self.state.replace(kv_pages=restored)

    def _all_allowed_on_device(self, rows: int) -> jax.Array:
        if rows not in self._allowed:
            self._allowed[rows] = jax.device_put(self._all_allowed[:rows])
        return self._allowed[rows]

    @staticmethod
    def _pending_choice(
        plan: StepPlan, reading: ReadingInputs, choice: ChoiceInputs, scores: Scores
    ) -> Pending:
        """A step that has come to its logits, with what some row wants to know of its prompt."""
        pending = Pending(plan, waiting=(scores.logits_SV, choice))
        if reading.any_prompt_logprobs:
            pending.prompt_logprobs = (
                scores.prompt_logprob_T,
                scores.prompt_top_ids_TK,
                scores.prompt_top_logprobs_TK,
            )
        if reading.any_pooling:
            pending.pooled_SD = scores.pooled_SD
        return pending

    def _choose(self, pending: Pending, allowed_SW) -> None:
        """Sends the second half of a step."""
        (logits_SV, choice), pending.waiting = pending.waiting, None
        program = self.choosers[len(choice.slot_S), choice.settings_SF is None]
        self.state, outputs = program.compiled(
            self.state, logits_SV, program.wire.pack(choice), allowed_SW
        )
        pending.token_S = outputs.token_S
        if self.rows.logprobs[pending.plan.slot_S].any():
            pending.logprobs = outputs.logprob_S, outputs.top_ids_SK, outputs.top_logprobs_SK
        _send_back(pending)

    def _admit(self, slot: int, sequence) -> None:
        self.rows.admit(slot, sequence)
        params = sequence.request.params
        if params.penalised or params.logit_bias or params.min_tokens:
            length, vocab_size = self.shape.max_model_len, self.spec.num_tokens
            row = row_settings(sequence.tokens, params, self.end_ids, length, vocab_size)
            self.state = self._set_row(self.state, np.int32(slot), row)

    def is_done(self, pending: Pending) -> bool:
        """Whether fetch would find the step's tokens there."""
        return pending.token_S is not None and pending.token_S.is_ready()

    def fetch(self, pending: Pending) -> StepResult:
        """Waits for a step's tokens. Row r of the result is row r of its plan."""
        plan = pending.plan
        result = StepResult(np.asarray(pending.token_S)[: plan.num_rows])
        if pending.logprobs is not None:
            logprob_S, ids_SK, top_SK = (np.asarray(x)[: plan.num_rows] for x in pending.logprobs)
            result = dataclasses.replace(
                result, logprob_S=logprob_S, top_ids_SK=ids_SK, top_logprobs_SK=top_SK
            )
        if pending.prompt_logprobs is not None:
            scores = _prompt_scores(plan, *map(np.asarray, pending.prompt_logprobs))
            result = dataclasses.replace(result, prompt_scores=scores)
        if pending.pooled_SD is not None:
            pooled = _pooled(plan, np.asarray(pending.pooled_SD))
            result = dataclasses.replace(result, pooled=pooled)
        return result


def _send_back(pending: Pending) -> None:
    """Starts the copies to the host of what some row asked for."""
    if jax.default_backend() != "cpu":  # there the host reads the array where it is
        read = (pending.token_S, pending.logprobs, pending.prompt_logprobs, pending.pooled_SD)
        for array in jax.tree.leaves(read):
            array.copy_to_host_async()


def _prompt_scores(plan: StepPlan, logprob_T, top_ids_TK, top_logprobs_TK):
    """{row: PromptScores} of the prompt tokens that follow each computed position."""
    found = {}
    for row, sequence in enumerate(plan.sequences):
        start = int(plan.start_S[row])
        wanted = sequence.request.params.prompt_logprobs is not None and sequence.index == 0
        first, last = plan.cu_q_len_S1[row], plan.cu_q_len_S1[row + 1]
        count = min(int(last - first), sequence.num_prompt - 1 - start)
        if wanted and count > 0:
            part = slice(first, first + count)
            found[row] = PromptScores(
                start + 1, logprob_T[part], top_ids_TK[part], top_logprobs_TK[part]
            )
    return found


def _pooled(plan: StepPlan, pooled_SD) -> dict[int, np.ndarray]:
    """{row: what was pooled} of the rows whose prompt this step completes."""
    return {
        row: pooled_SD[row].copy()  # the rest of the step's array need not be kept with it
        for row, sequence in enumerate(plan.sequences)
        if sequence.request.params.pooling is not None and plan.end_S[row] == sequence.num_prompt
    }


@dataclasses.dataclass(frozen=True)
class Step:
    """A step, or half of one, before it is compiled, whatever the device."""

    wire: Wire
    run: Callable  # (what stays, the state to donate, *inputs) -> (state, outputs)
    inputs: tuple  # ShapeDtypeStructs


def bucket_step(spec: StepSpec, shape: RunnerShape, bucket_T: int, sampled: bool) -> Step:
    """What the runner compiles for a bucket; tools compile the same for devices that are not here.
    run(params, state, vector); sampled: no further than the logits."""
    wire = Wire(pack.empty(bucket_T, shape.num_slots, shape.max_pages, sampled=sampled))
    function = score_step if sampled else greedy_step

    def run(params, state, vector):
        return function(params, state, wire.unpack(vector), spec)

    return Step(wire, run, (jax.ShapeDtypeStruct(wire.shape, np.int32),))


def choice_step(spec: StepSpec, rows: int, takes_best: bool) -> Step:
    """The second half of a step of so many rows. run(state, logits_SV, vector, allowed_SW)."""
    wire = Wire(pack.empty_choice(rows, takes_best=takes_best))
    function = best_step if takes_best else choose_step

    def run(state, logits_SV, vector, allowed_SW):
        return function(state, logits_SV, wire.unpack(vector), allowed_SW, spec)

    logits = jax.ShapeDtypeStruct((rows, spec.model_config.vocab_size), np.float32)
    vector = jax.ShapeDtypeStruct(wire.shape, np.int32)
    masks = jax.ShapeDtypeStruct((rows, _mask_words(spec)), np.int32)
    return Step(wire, run, (logits, vector, masks))


def compiler_options(device_kind: str) -> dict[str, str]:
    """XLA options that a step needs on a kind of device.

    TPU 7x would tile 16-bit arrays by 16 rows inside the loop over layers and by 8 outside, and so
    copy all stacked weights in every step.
    """
    by_kind = {"TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}}
    return by_kind.get(device_kind, {})


def _mask_words(spec: StepSpec) -> int:
    """int32 words of a row's bit mask over the vocabulary."""
    return -(-spec.model_config.vocab_size // 32)


def _shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

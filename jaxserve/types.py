"""The values that cross rooms: what a client asks, what the engine tracks, what comes back.

Host only: nothing here imports jax, so the scheduler, the server and the simulator share it.

Walk: a client's `SamplingParams` and prompt ids become a frozen `Request`; the scheduler tracks one
`Sequence` per choice of it; each device step's `StepResult` turns into `TokenEvent`s; text is added
and an `OutputDelta` leaves for the client. The offline API folds the deltas of a request into one
`RequestOutput`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxserve.grammar import GrammarSpec

# Limits on one request, stated once. A stranger may send anything; these bound the work it causes.
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 128
MAX_LOGIT_BIAS = 256
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1
POOLINGS = ("mean", "last")


class RequestRefused(ValueError):
    """A request the engine will not take; the message says what to change.

    code: "invalid_value", "invalid_grammar", "context_length_exceeded", "capacity_exceeded",
      "queue_full", "rate_limited" (a tenant's own quota) or "shutting_down". retry_after: seconds
      after which trying again makes sense, None when never.
    param: name of the offending field, if one is to blame.
    """

    def __init__(self, message, *, code="invalid_value", param=None, retry_after=None):
        super().__init__(message)
        self.code = code
        self.param = param
        self.retry_after = retry_after


class EngineFailed(RuntimeError):
    """A device step failed and took this request with it. The request itself was not at fault."""


class EngineStopped(EngineFailed):
    """The engine was shut down while the request was open."""


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end token, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the model length
    ABORT = "abort"  # the client left, or asked to stop
    TIMEOUT = "timeout"  # its deadline passed
    ERROR = "error"  # a fault of the engine


def _refuse(param, value, rule):
    raise RequestRefused(f"{param}={value!r}: {rule}", param=param)


def _number(params, name, low, high, *, integer=False):
    value = getattr(params, name)
    kinds = (int,) if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        _refuse(name, value, "must be an integer" if integer else "must be a number")
    if not (math.isfinite(value) and low <= value <= high):
        _refuse(name, value, f"must be between {low} and {high}")


def _token_id(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        _refuse(name, value, "token ids are integers from 0")
    return int(value)


def token_ids(prompt) -> tuple[int, ...]:
    """The ids of a sequence of integers, numpy's too, or of an array of one dimension. Raises
    RequestRefused for anything else; whether the model has them is checked by the scheduler."""
    if hasattr(prompt, "dtype"):
        array = np.asarray(prompt)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            kind = f"an array of {array.dtype} with shape {array.shape}"
            raise RequestRefused(f"{kind} is no prompt: {_PROMPTS}", param="prompt")
        return tuple(array.tolist())
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, SequenceOf):
        raise RequestRefused(f"{prompt!r:.80} is no prompt: {_PROMPTS}", param="prompt")
    for kind in set(map(type, prompt)) - {int}:
        if not issubclass(kind, (int, np.integer)) or kind is bool:
            rule = f"token ids are integers, and one is of type {kind.__name__}"
            raise RequestRefused(f"prompt: {rule}", param="prompt")
    return tuple(map(int, prompt))


_PROMPTS = "give a text, or a list or array of token ids"


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Validated once, here; raises RequestRefused.

    Order on the logits: logit_bias, penalties, min_tokens mask, temperature, top_k, top_p, min_p.
    """

    n: int = 1  # choices per prompt, 1..128
    max_tokens: int | None = 16  # None: as many as the model length allows
    min_tokens: int = 0  # end and stop tokens are masked until then
    temperature: float = 1.0  # 0 (or under 1e-5) is greedy
    top_k: int = 0  # 0, -1 or None: off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]: keep tokens of at least min_p times the best one's probability
    repetition_penalty: float = 1.0  # over prompt and output; (0, 100]
    presence_penalty: float = 0.0  # over output; -2..2
    frequency_penalty: float = 0.0  # over output; -2..2
    logit_bias: Mapping[int, float] = dataclasses.field(
        default_factory=dict
    )  # -100 bans, 100 forces
    seed: int | None = None
    stop: SequenceOf[str] = ()  # stop strings, found across tokens and cut from the text
    stop_token_ids: SequenceOf[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; k: the token's own and the k best, k <= 20
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None  # what the output must look like; see jaxserve.grammar
    pooling: str | None = None  # "mean" or "last": of the prompt's hidden states; max_tokens is 0

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)
        if self.top_k is None or self.top_k == -1:
            put("top_k", 0)
        if self.stop is None:
            put("stop", ())
        put("stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        put("stop_token_ids", tuple(self.stop_token_ids or ()))
        put("logit_bias", dict(self.logit_bias or {}))
        _number(self, "n", 1, MAX_N, integer=True)
        if self.max_tokens is not None:
            _number(self, "max_tokens", 0, 2**31 - 1, integer=True)
        _number(self, "min_tokens", 0, 2**31 - 1, integer=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"is more than max_tokens={self.max_tokens}")
        _number(self, "temperature", 0, 100)
        _number(self, "top_k", 0, 2**31 - 1, integer=True)
        _number(self, "top_p", 0, 1)
        if self.top_p == 0:
            _refuse("top_p", self.top_p, "must be above 0; for greedy tokens use temperature=0")
        _number(self, "min_p", 0, 1)
        _number(self, "repetition_penalty", 0, 100)
        if self.repetition_penalty == 0:
            _refuse("repetition_penalty", self.repetition_penalty, "must be above 0; 1 is off")
        _number(self, "presence_penalty", -2, 2)
        _number(self, "frequency_penalty", -2, 2)
        if self.seed is not None:
            _number(self, "seed", -(2**63), MAX_SEED, integer=True)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _number(self, name, 0, MAX_LOGPROBS, integer=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "must be true or false")
        if self.pooling is not None and (self.pooling not in POOLINGS or self.max_tokens != 0):
            _refuse("pooling", self.pooling, f"is one of {', '.join(POOLINGS)}, with max_tokens=0")
        self._check_lists()

    def _check_lists(self):
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse("stop", len(self.stop), f"at most {MAX_STOP_STRINGS} stop strings")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                _refuse("stop", text, f"stop strings have 1 to {MAX_STOP_CHARS} characters")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            _refuse("stop_token_ids", len(self.stop_token_ids), f"at most {MAX_STOP_IDS}")
        for token in self.stop_token_ids:
            _token_id("stop_token_ids", token)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            _refuse("logit_bias", len(self.logit_bias), f"at most {MAX_LOGIT_BIAS} entries")
        for token, bias in self.logit_bias.items():
            _token_id("logit_bias", token)
            if (
                isinstance(bias, bool)
                or not isinstance(bias, (int, float))
                or not -100 <= bias <= 100
            ):
                _refuse("logit_bias", bias, "biases are numbers from -100 to 100")

    @property
    def greedy(self) -> bool:
        """Below 1e-5 the other tokens' probability is 0 in float32: the same as the argmax."""
        return self.temperature < 1e-5

    @property
    def takes_best(self) -> bool:
        """Whether its tokens are the best of the bare logits among what its grammar allows, and
        nothing is told of them."""
        return (
            self.greedy
            and not self.logit_bias
            and self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and self.min_tokens == 0
            and self.logprobs is None
        )

    @property
    def plain(self) -> bool:
        """True when the greedy-only step program serves this request: argmax of the bare logits."""
        return (
            self.takes_best
            and self.prompt_logprobs is None
            and self.grammar is None
            and self.pooling is None
        )

    @property
    def penalised(self) -> bool:
        """True when sampling needs the row's token history on the device."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses ids that the model does not have. Devices clamp or wrap such ids silently."""
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(self, name):
                if token >= vocab_size:
                    _refuse(name, token, f"the vocabulary has ids 0 to {vocab_size - 1}")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One prompt and what to do with it. Frozen; the scheduler's own state is in its Sequences."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    seed: int = 0  # params.seed, or one drawn at arrival: the scheduler owns no randomness
    tenant: str = ""
    priority: int = 0  # lower runs earlier
    arrival: float = 0.0  # seconds on the engine's clock
    deadline: float | None = None  # same clock; past it the request ends, queued or running
    cache_salt: str = ""  # requests share prefix pages only with the same salt


class Sequence:
    """One choice of a request. Owned and changed by the scheduler alone.

    What changes with every step (positions, pages, tokens in flight) lives in the scheduler's
    SlotArray while the sequence holds a slot; here is what outlives a slot.
    """

    __slots__ = (
        "request", "index", "serial", "tokens", "num_prompt", "max_total", "slot", "finish",
        "stop_reason", "num_cached", "num_scored", "num_preemptions", "must_pass", "page_chain",
        "host_pages", "host_tokens",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, max_total: int, serial: int = 0):
        self.request = request
        self.index = index  # which of the request's n choices
        self.serial = serial  # order of arrival, the last word in every comparison
        self.tokens = list(request.prompt_ids)  # prompt, then output as it is absorbed
        self.num_prompt = len(self.tokens)
        self.max_total = max_total  # prompt + output tokens at which it ends with LENGTH
        self.slot: int | None = None  # its row in SlotArray, from admission to finish or preemption
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None  # the client's stop id or string that ended it
        self.num_cached = 0  # prompt tokens served by the prefix cache at first admission
        self.num_scored = 0  # prompt positions whose log-probabilities were passed on
        self.num_preemptions = 0
        self.must_pass = -1  # not preempted again before it has more tokens than this
        self.page_chain: list[bytes] = []  # digests of its full pages, as far as worked out
        self.host_pages: list[int] = []  # while preempted: where the host keeps its KV, if it does
        self.host_tokens = 0  # tokens whose KV that is

    @property
    def id(self) -> tuple[str, int]:
        return self.request.id, self.index

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def __repr__(self):
        return (
            f"Sequence({self.request.id}/{self.index}, prompt={self.num_prompt}, "
            f"tokens={len(self.tokens)}, slot={self.slot}, finish={self.finish})"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of prompt tokens from one chunk.

    logprob[i] is that of the prompt token at position start + i given all before it.
    """

    start: int
    logprob: np.ndarray  # float32 [count]
    top_ids: np.ndarray  # int32 [count, MAX_LOGPROBS]
    top_logprobs: np.ndarray  # float32 [count, MAX_LOGPROBS]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What one device step brought, on the host. Row r belongs to row r of the step's plan."""

    token_S: np.ndarray  # int32; meaningful where the plan's samples_S is true
    logprob_S: np.ndarray | None = None  # float32; None from a greedy-only step
    top_ids_SK: np.ndarray | None = None  # int32, K = MAX_LOGPROBS
    top_logprobs_SK: np.ndarray | None = None
    prompt_scores: Mapping[int, PromptScores] = dataclasses.field(default_factory=dict)  # by row
    pooled: Mapping[int, np.ndarray] = dataclasses.field(
        default_factory=dict
    )  # float32 [D], by row


@dataclasses.dataclass(slots=True)
class TokenEvent:
    """One thing that happened to one sequence. token None: an end (or scores) without a token."""

    sequence: Sequence
    token: int | None
    finish: FinishReason | None = None
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    prompt_scores: PromptScores | None = None
    pooled: np.ndarray | None = None
    error: Exception | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one chosen token and the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(slots=True)
class OutputDelta:
    """News of one choice: text and tokens since the last delta, and at the end its reason.

    text never holds half a character and never any part of a stop string. token_ids and logprobs
    may run ahead of text while characters or possible stop strings are incomplete.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # once, on the first delta
    num_cached_tokens: int = 0
    pooled: np.ndarray | None = None  # float32 [hidden size], of a request with pooling, at its end
    error: Exception | None = None  # with finish_reason ERROR


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One finished choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A finished request of the offline API."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0

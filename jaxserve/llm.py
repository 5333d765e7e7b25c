"""LLM: the offline API, on the same EngineCore as the server.

from jaxserve import LLM, SamplingParams

llm = LLM("demo")
for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import collections
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.types import (
    CompletionOutput,
    FinishReason,
    OutputDelta,
    Request,
    RequestOutput,
    SamplingParams,
    token_ids,
)

Prompt = str | Sequence[int] | np.ndarray | Mapping[str, str | Sequence[int]]


class LLM:
    """Loads a model and generates for lists of prompts. Threads may share it.

    Args:
      model: "demo", a .gguf file, a Hugging Face folder, or a hub id.
      settings: any field of EngineConfig, by name.
    """

    def __init__(self, model: str = "demo", *, progress=None, **settings):
        # A full queue refuses so that clients of a server try elsewhere; here is nobody else.
        settings = {"max_queued": sys.maxsize, "max_queued_tokens": sys.maxsize} | settings
        self._start(EngineConfig(model=str(model), **settings), progress)

    @classmethod
    def from_config(
        cls, config: EngineConfig, scheduling: SchedulerConfig, *, progress=None, cache_dir=None
    ) -> LLM:
        """An LLM of settings already made; cache_dir: where models and programs are kept."""
        llm = cls.__new__(cls)
        llm._start(config, progress, scheduling, cache_dir)
        return llm

    def _start(self, config, progress, scheduling=None, cache_dir=None) -> None:
        from jaxserve.engine.start import build  # here, so that importing jaxserve is quick

        self.engine = build(
            config,
            scheduling,
            clock=time.monotonic,
            progress=progress,
            cache_dir=cache_dir,
        )
        self.engine.warm_up()
        self.tokenizer = self.engine.tokenizer
        self.config = self.engine.config
        self._inboxes: dict[str, collections.deque] = {}  # by request
        self._lock = threading.RLock()  # of the core; a stream may be collected as garbage under it

    def get_tokenizer(self):
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output=None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts.

        prompts: a text, token ids (a list or an array), {"prompt": text},
          {"prompt_token_ids": ids}, or a list of these.
        sampling_params: one for all, or one for each prompt.
        on_output: called with each RequestOutput when it finishes, e.g. for a progress bar.

        Raises RequestRefused for a prompt that cannot be served; then none has run.
        """
        prompts = _as_list(prompts)
        params = _for_each(sampling_params, len(prompts))
        requests, outputs = [], {}
        for prompt, choice in zip(prompts, params):
            text, ids = self._encode(prompt)
            request = self._request(ids, choice)
            requests.append(request)
            blank = [CompletionOutput(i, "", [], _no_logprobs(choice)) for i in range(choice.n)]
            outputs[request.id] = RequestOutput(request.id, text, list(ids), blank)
        self._run(requests, outputs, on_output)
        return list(outputs.values())

    def chat(
        self,
        messages: Sequence[Mapping] | Sequence[Sequence[Mapping]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools=None,
        **template_arguments,
    ) -> list[RequestOutput]:
        """Like generate, for one conversation or a list of them, by the model's chat template."""
        conversations = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        prompts = [
            self.tokenizer.encode_chat(list(conversation), tools=tools, **template_arguments)
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params)

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[OutputDelta]:
        """Deltas of one prompt as they come; closing the iterator aborts it."""
        request = self._request(self._encode(prompt)[1], params)
        open_choices, inbox = params.n, collections.deque()
        try:
            self._add([request], inbox)
            while open_choices:
                for _, delta in self._next(inbox):
                    if delta.error is not None:
                        raise delta.error
                    open_choices -= delta.finish_reason is not None
                    yield delta
        finally:
            self._leave([request])

    def _encode(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            return prompt, tuple(self.tokenizer.encode(prompt))
        return None, token_ids(prompt)

    def _request(self, ids, params) -> Request:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"{params!r} is no SamplingParams")
        return Request(
            id=secrets.token_hex(8),
            prompt_ids=ids,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            arrival=self.engine.core.clock(),
        )

    def _run(self, requests, outputs, on_output) -> None:
        open_choices = {request.id: request.params.n for request in requests}
        inbox = collections.deque()
        try:
            self._add(requests, inbox)
            while open_choices:
                for request_id, delta in self._next(inbox):
                    _fold(outputs[request_id], delta)
                    if delta.finish_reason is None:
                        continue
                    if delta.error is not None:
                        raise delta.error
                    open_choices[request_id] -= 1
                    if not open_choices[request_id]:
                        del open_choices[request_id]
                        if on_output:
                            on_output(outputs[request_id])
        finally:  # refused, failed or interrupted: leave nothing behind
            self._leave(requests)

    # A step brings tokens of every request, also of streams that wait for their reader.

    def _add(self, requests, inbox) -> None:
        core = self.engine.core
        with self._lock:
            for request in requests:
                core.add(request, core.output.matchers(request.params))
                self._inboxes[request.id] = inbox

    def _next(self, inbox) -> Iterator[tuple[str, OutputDelta]]:
        """What has come for an inbox, after a step if that is nothing."""
        with self._lock:
            if not inbox:
                for request_id, delta in self.engine.core.step():
                    if request_id in self._inboxes:
                        self._inboxes[request_id].append((request_id, delta))
        while inbox:
            yield inbox.popleft()

    def _leave(self, requests) -> None:
        core = self.engine.core
        with self._lock:
            for request in requests:
                if self._inboxes.pop(request.id, None) is not None:
                    core.abort(request.id)
            while not self._inboxes and core.has_work:
                core.step()


def _as_list(prompts) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)) or hasattr(prompts, "dtype"):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], (int, np.integer)) else prompts


def _for_each(params, count) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    params = list(params)
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts: give one, or as many")
    return params


def _no_logprobs(params: SamplingParams):
    return None if params.logprobs is None else []


def _fold(output: RequestOutput, delta: OutputDelta) -> None:
    choice = output.outputs[delta.index]
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    if choice.logprobs is not None and delta.logprobs:
        choice.logprobs += delta.logprobs
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = delta.prompt_logprobs
    output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
    if delta.finish_reason is not None:
        choice.finish_reason = FinishReason(delta.finish_reason).value
        choice.stop_reason = delta.stop_reason

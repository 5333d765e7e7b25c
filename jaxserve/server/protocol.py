"""What clients may send: strict models of the request bodies, and how they become SamplingParams.

Strict: "2" is not 2 and true is not 1. Ranges are checked once, by SamplingParams. A field that
would change the answer and is not supported is refused by name; fields that only label, store or
bill a request are accepted and ignored; so is null, everywhere OpenAI allows it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

from jaxserve.server.errors import ApiError, quote
from jaxserve.types import MAX_LOGPROBS, SamplingParams

# Labels, billing and storage: they do not change which tokens come back.
IGNORED_FIELDS = frozenset([
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user", "verbosity", "request_id",
])  # fmt: skip
MAX_PROMPTS = 1024  # prompts in one request's list; n times prompts is bounded by it too
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI documents

NonNegative = Annotated[int, pydantic.Field(ge=0)]
Salt = Annotated[str, pydantic.Field(min_length=1, max_length=256)]
Priority = Annotated[int, pydantic.Field(ge=-(2**31), lt=2**31)]
Timeout = Annotated[float, pydantic.Field(gt=0)]


class Body(pydantic.BaseModel):
    """A request body. Unknown fields are refused unless null or in IGNORED_FIELDS."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None

    def check_fields(self) -> None:
        """Raises ApiError for the first field that the server does not know or does not support."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in IGNORED_FIELDS:
                raise ApiError(400, f"{name}: unknown field", "unknown_field", name)


def refuse_unless(body: Body, **neutral) -> None:
    """Refuses fields with another value than the neutral ones: name=(what changes nothing)."""
    for name, values in neutral.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            raise ApiError(
                400, f"{name}={quote(value)} is not supported here", "unsupported_value", name
            )


class StreamOptions(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: accepted, not done
    continuous_usage_stats: Literal[False] | None = None


class Generating(Body):
    """Fields that every generating endpoint of OpenAI's style shares, vLLM's extras included."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's; vLLM's names and meanings.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    use_beam_search: bool | None = None
    # The form of the output: OpenAI's word for it, then vLLM's two.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    length_penalty: float | None = None

    def check_fields(self) -> None:
        super().check_fields()
        refuse_unless(
            self, use_beam_search=(False,), length_penalty=(1.0,),
            spaces_between_special_tokens=(True,),
        )  # fmt: skip
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options is only allowed with stream=true", "invalid_value",
                "stream_options",
            )  # fmt: skip

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self, **overrides) -> SamplingParams:
        """SamplingParams of this body; absent and null fields take the defaults."""
        names = (
            "max_tokens", "temperature", "top_p", "n", "seed", "stop", "presence_penalty",
            "frequency_penalty", "top_k", "min_p", "repetition_penalty", "min_tokens",
            "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
            "prompt_logprobs",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names}
        given["logit_bias"] = token_biases(self.logit_bias)
        given |= overrides
        max_tokens = given.pop("max_tokens")
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=max_tokens, **given)


def token_biases(biases: dict[str, float] | None) -> dict[int, float] | None:
    """{"50256": -100} to {50256: -100}. JSON keys are strings; only plain digits name a token."""
    if biases is None:
        return None
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ApiError(
                400, f"logit_bias: {quote(key)} is not a token id", "invalid_value", "logit_bias"
            )
    return {int(key): bias for key, bias in biases.items()}


class CompletionRequest(Generating):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    return_token_ids: bool | None = None

    def check_fields(self) -> None:
        super().check_fields()
        refuse_unless(self, best_of=(self.n or 1,), suffix=("",))

    def params(self) -> SamplingParams:
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        overrides = {"max_tokens": limit, "logprobs": self.logprobs}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            overrides["prompt_logprobs"] = self.logprobs
        return self.sampling_params(**overrides)


class ContentPart(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="ignore")

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="ignore")

    name: str
    arguments: str


class ToolCall(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="ignore")

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(pydantic.BaseModel):
    """One chat message. Only text: parts of other types are refused, nothing is ever fetched."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(Generating):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: NonNegative | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None

    def check_fields(self) -> None:
        super().check_fields()
        refuse_unless(
            self, echo=(False,), modalities=(["text"],), audio=(), web_search_options=(),
            functions=([],), function_call=("none",), chat_template=(),
            continue_final_message=(False,),
        )  # fmt: skip
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "invalid_value", "top_logprobs")

    def params(self) -> SamplingParams:
        limit = self.max_completion_tokens
        overrides = {"max_tokens": self.max_tokens if limit is None else limit}
        top = self.top_logprobs
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            rule = f"top_logprobs={top}: must be between 0 and {MAX_LOGPROBS}"
            raise ApiError(400, rule, "invalid_value", "top_logprobs")
        if self.logprobs:
            overrides["logprobs"] = top or 0
        return self.sampling_params(**overrides)


class EmbeddingsRequest(Body):
    """POST /v1/embeddings. pooling is not OpenAI's."""

    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["mean", "last"] | None = None
    add_special_tokens: bool | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None

    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=0, pooling=self.pooling or "mean")


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages through the chat template."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: list[int]

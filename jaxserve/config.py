"""Every setting, once: frozen dataclasses whose fields become the command line's flags.

A field's `metadata["help"]` is its flag's help. Defaults serve the demo model on a small CPU;
None means "worked out at start-up", and `jaxserve info` prints what it became.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile

POLICIES = ("fcfs", "priority", "deadline", "vtc")  # of scheduling, by name


def setting(default, help, **metadata):
    """A dataclass field with its help text; choices=(...) restricts it, path=USE makes it a file's
    name: see check_path."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


def check_paths(config) -> None:
    """Raises OSError for a path among the settings that cannot be used: before a model is loaded,
    which takes long, and not after."""
    for field in dataclasses.fields(config):
        use, path = field.metadata.get("path"), getattr(config, field.name)
        if use is not None and path is not None:
            check_path(path, use)


def check_path(path: str, use: str) -> None:
    """Raises the OSError that a later use would: "read" of a file, "write" of one that may not be
    there yet, or files made in a "folder", which is made if it is not there."""
    if use == "folder":
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
        return
    if pathlib.Path(path).is_fifo():
        return  # whoever is at its other end would take this for its use
    there = os.path.lexists(path)
    open(path, "rb" if use == "read" else "ab").close()
    if not there:
        os.unlink(path)


def _check_choices(config):
    for field in dataclasses.fields(config):
        choices = field.metadata.get("choices")
        value = getattr(config, field.name)
        if choices and value is not None and value not in choices:
            raise ValueError(
                f"--{field.name}={value}: choose one of {', '.join(map(str, choices))}"
            )


def _check_at_least(config, **lows):
    for name, low in lows.items():
        value = getattr(config, name)
        if value is not None and not value >= low:  # or nan
            raise ValueError(f"--{name}={value}: must be at least {low}")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What the engine runs and with how much. validate() raises ValueError with the remedy."""

    model: str = setting("demo", "demo, a .gguf file, a Hugging Face folder, or a hub id.")
    tokenizer: str | None = setting(None, "Tokenizer folder or file; default: the model's own.")
    chat_template: str | None = setting(
        None, "Jinja file of the chat template; default: the model's own.", path="read"
    )
    served_model_name: str | None = setting(None, "Name clients use; default: from --model.")
    weight_dtype: str = setting(
        "auto",
        "Weights in memory. auto: the fastest form here that keeps the reference's tokens.",
        choices=("auto", "float32", "bfloat16", "int8"),
    )
    dtype: str = setting(
        "auto",
        "Activations. auto: bfloat16 on TPU and GPU unless weights are wider, else float32. On a "
        "CPU bfloat16 is faster if the processor multiplies it (AMX, newer AVX-512), and keeps 8 "
        "bits of every number; int8 is that, and rounds what meets quantised weights to 8 bits, "
        "in steps that suit each 32 numbers, which without AMX is twice as fast again.",
        choices=("auto", "float32", "bfloat16", "int8"),
    )
    kv_dtype: str = setting(
        "auto",
        "KV cache. auto: as dtype.",
        choices=("auto", "float32", "bfloat16", "int16", "int8", "float8_e4m3fn"),
    )
    max_model_len: int | None = setting(
        None, "Prompt plus output tokens of a sequence; default: the model's, at most 8192."
    )
    num_slots: int = setting(16, "Sequences that run at once (rows of a step).")
    token_budget: int = setting(256, "Tokens a step computes at most; long prompts go in chunks.")
    page_size: int = setting(16, "Tokens of KV a page.")
    num_pages: int | None = setting(
        None, "KV pages; default: what the slots can use, within --kv_memory_gib."
    )
    kv_memory_gib: float | None = setting(
        None, "Bound on KV memory; default: 1 on a CPU, 0.9 of what weights leave free elsewhere."
    )
    host_kv_gib: float = setting(
        0.0,
        "Host memory for the KV of sequences that lose their place; used when fetching it back is "
        "quicker than computing it again.",
    )
    host_kv_gib_per_s: float = setting(8.0, "How fast KV travels between device and host.")
    prefix_caching: bool = setting(True, "Reuse the KV of prompts that begin alike.")
    batching: str = setting(
        "continuous",
        "continuous refills freed slots at once; static, a baseline, computes a batch at its full "
        "width until its slowest row ends.",
        choices=("continuous", "static"),
    )
    pipelined: bool = setting(True, "Dispatch a step before reading the one before it.")
    deterministic: bool = setting(False, "One step shape for all: same tokens in any company.")
    attention_backend: str = setting(
        "auto", "Attention backend.", choices=("auto", "tpu", "gpu", "cpu", "reference")
    )
    max_queued: int = setting(1024, "Requests waiting; past that new ones are refused.")
    max_queued_tokens: int = setting(4_000_000, "Prompt tokens waiting; past that, refused.")
    decision_log: str | None = setting(
        None,
        "File for every plan and its reasons; holds token ids. Read by explain and replay.",
        path="write",
    )
    compile_cache: str | None = setting(
        None, "Folder of compiled programs; default: the user's cache folder. 'off' disables it."
    )

    def validate(self) -> None:
        _check_choices(self)
        _check_at_least(
            self, num_slots=1, token_budget=1, page_size=1, num_pages=2, max_model_len=2,
            max_queued=1, max_queued_tokens=1, kv_memory_gib=0, host_kv_gib=0,
            host_kv_gib_per_s=1e-3,
        )  # fmt: skip
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"--page_size={self.page_size}: must be a power of two")
        if self.token_budget < self.num_slots:
            raise ValueError(
                f"--token_budget={self.token_budget} is below --num_slots={self.num_slots}: every "
                "running sequence needs one token a step; raise the budget or lower the slots"
            )


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Who is served first, and within which bounds. None turns a bound off."""

    policy: str = setting(
        "fcfs",
        "Who goes first. fcfs: by arrival; priority: lower values; deadline: the earliest; "
        "vtc: the tenant that has had the least. Short prompts may pass: see --prefill_sharing.",
        choices=POLICIES,
    )
    prefill_sharing: bool = setting(
        True,
        "Keep short prompts from waiting for long ones: three of four slots that come free go to "
        "the shortest prompts among those whom the policy ranks by arrival alone, and half of a "
        "step's prefill tokens to the shortest; the others to the first in turn. "
        "--noprefill_sharing: strictly in the policy's order.",
    )
    itl_target_ms: float | None = setting(
        None, "Longest gap between two tokens of a stream to aim for, by smaller prefill chunks."
    )
    vtc_input_weight: float = setting(1.0, "Service of a prompt token, for fairness.")
    vtc_output_weight: float = setting(2.0, "Service of an output token, for fairness.")
    tenant_max_requests: int | None = setting(None, "Requests of one tenant open at once.")
    tenant_requests_per_s: float | None = setting(None, "Requests a second of one tenant.")
    tenant_burst_s: float = setting(10.0, "Seconds of that rate which may come at once.")
    guard_queue_age_s: float | None = setting(
        None, "When a sequence has queued this long, refuse arrivals of the lowest priority."
    )
    guard_itl_ratio: float | None = setting(
        1.5, "When p99 of the gap between tokens exceeds --itl_target_ms by this, halve chunks."
    )
    guard_fairness_gap: float | None = setting(
        None, "When tenants' service differs by this, refuse arrivals of the one that had the most."
    )
    guard_preemptions_per_min: float | None = setting(
        120.0, "When more sequences a minute lose their place for want of pages, pause admission."
    )
    guard_page_pressure: float | None = setting(
        None, "When this part of the pages is in use, admissions leave a tenth of them free."
    )
    guard_static_after_s: float | None = setting(
        None, "When two such signs last this long, fall back to static batching."
    )

    def validate(self) -> None:
        _check_choices(self)
        _check_at_least(
            self, itl_target_ms=1e-3, vtc_input_weight=0, vtc_output_weight=0,
            tenant_max_requests=1, tenant_requests_per_s=1e-6, tenant_burst_s=0,
            guard_queue_age_s=0, guard_itl_ratio=1, guard_fairness_gap=0,
            guard_preemptions_per_min=0, guard_page_pressure=0, guard_static_after_s=0,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """How the HTTP server listens and what it bounds."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = setting(8000, "Port to listen on; 0 picks a free one.")
    max_body_bytes: int = setting(8 << 20, "Largest request body; larger ones get 413.")
    request_timeout_s: float = setting(600.0, "A request's longest life, queued and running.")
    drain_timeout_s: float = setting(30.0, "On SIGTERM, how long running requests may finish.")
    api_keys_file: str | None = setting(
        None, "File of accepted API keys, one a line; default: open.", path="read"
    )
    allowed_origins: str = setting(
        "", "Web origins whose pages may read answers, comma separated; * for all."
    )
    tool_parser: str = setting(
        "auto",
        "Format of the model's tool calls. auto: the one that its chat template shows.",
        choices=(
            "auto",
            "hermes",
            "llama3_json",
            "mistral",
            "pythonic",
            "qwen3_coder",
            "deepseek_v3",
            "phi4",
            "gemma4",
        ),
    )
    client_timeout_s: float = setting(
        60.0, "Longest silence of a client that sends a request or reads an answer."
    )
    shadow_policy: str | None = setting(
        None,
        "Policy to try on paper on the live arrivals; each minute told beside the one that serves.",
        choices=POLICIES,
    )
    shadow_cost_model: str | None = setting(
        None, "Its costs, a file by `calibrate`; default: fitted to the live steps.", path="read"
    )
    otlp_traces_endpoint: str | None = setting(
        None, "Collector for OpenTelemetry spans, as http://host:4318/v1/traces; default: none."
    )
    profile_dir: str | None = setting(
        None,
        "Folder for traces that /debug/profile makes for holders of keys; default: no route.",
        path="folder",
    )

    def validate(self) -> None:
        _check_choices(self)
        _check_at_least(
            self, port=0, max_body_bytes=1024, request_timeout_s=0, drain_timeout_s=0,
            client_timeout_s=0,
        )  # fmt: skip
        if not self.host:
            raise ValueError("--host is empty: give an address; 0.0.0.0 for all of this machine")
        if self.port > 65535:
            raise ValueError(f"--port={self.port}: must be at most 65535")
        if self.profile_dir is not None and self.api_keys_file is None:
            raise ValueError(
                f"--profile_dir={self.profile_dir}: profiles are for holders of keys; name them "
                "with --api_keys_file"
            )

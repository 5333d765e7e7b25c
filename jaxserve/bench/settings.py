"""Settings of `jaxserve bench` and `jaxserve report`; their fields become flags.

A field's `metadata["only"]` names the kinds of measurement that heed it; without it all do.
"""

from __future__ import annotations

import dataclasses
import json

from jaxserve.config import setting

_ASKING = ("offline", "serve", "sweep")  # those that send a workload
_HTTP = ("serve", "sweep")


@dataclasses.dataclass(frozen=True)
class WorkloadConfig:
    """What is asked, and when. The same settings and seed give the same requests."""

    workload: str = setting(
        "skewed",
        "random, prefix (prompts that begin alike), sessions, skewed or poisson; a trace, .csv or "
        ".jsonl with input_tokens and output_tokens; or a .json or .jsonl file of requests with "
        "prompt or prompt_ids, and max_tokens.",
        only=_ASKING,
    )
    num_requests: int | None = setting(
        None, "Requests; default: 64, or all that a file holds.", only=_ASKING
    )
    seed: int = setting(7, "Of prompts, lengths and arrivals.", only=_ASKING)
    input_len: int = setting(
        256,
        "Prompt tokens: the mean of random, the prefix of prefix, a session's first.",
        only=_ASKING,
    )
    output_len: int = setting(
        64, "Output tokens: the mean of random, each of prefix and sessions.", only=_ASKING
    )
    request_rate: float | None = setting(
        None,
        "Requests a second; default: all at once, or a trace's own times.",
        only=("offline", "serve"),
    )
    burstiness: float = setting(
        1.0,
        "Gaps between arrivals of a rate are gamma distributed with this shape: 1 is Poisson, less "
        "comes in bursts.",
        only=_ASKING,
    )

    def validate(self) -> None:
        for name in ("num_requests", "input_len", "output_len", "request_rate", "burstiness"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # or nan
                raise ValueError(f"--{name}={value}: must be above 0")


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """How it is measured and where the figures go."""

    repeats: int = setting(3, "Measured runs; figures are their medians.")
    warmup: int = setting(4, "Requests before the measured runs, not counted.", only=_ASKING)
    compare: str = setting(
        "none",
        "static: also the static baseline, run by run.",
        choices=("none", "static"),
        only=("offline",),
    )
    ttft_target_ms: float | None = setting(
        None, "Goodput: time to first token within this.", only=_ASKING
    )
    tpot_target_ms: float | None = setting(
        None, "Goodput: time per output token within this.", only=_ASKING
    )
    e2e_target_ms: float | None = setting(None, "Goodput: whole request within this.", only=_ASKING)
    base_url: str | None = setting(
        None,
        "Measure this OpenAI-style server (http://host:port/v1); default: one of our own. Prompts "
        "are words of --model's tokenizer.",
        only=_HTTP,
    )
    api_model: str | None = setting(
        None, "Model name to ask for; default: the server's first.", only=_HTTP
    )
    api_key: str | None = setting(None, "Key for the server.", only=_HTTP)
    extra_body: str = setting(
        "{}", "More JSON for every request, as other servers need it.", only=_HTTP
    )
    max_concurrency: int | None = setting(
        None, "Requests in flight at most; default: no bound.", only=_HTTP
    )
    send_text: bool = setting(False, "Send prompts as text, not as token ids.", only=_HTTP)
    chat: bool = setting(
        False, "Ask /chat/completions, each prompt a message; default: /completions.", only=_HTTP
    )
    timeout_s: float = setting(600.0, "A request that takes longer has failed.", only=_HTTP)
    rates: str = setting(
        "0.25,0.5,1,2", "sweep: requests a second, or 'search' for the highest.", only=("sweep",)
    )
    ttft_p99_ms: float = setting(
        2000.0, "sweep --rates=search: bound on TTFT's p99.", only=("sweep",)
    )
    itl_p99_ms: float = setting(
        200.0, "sweep --rates=search: bound on inter-token time's p99.", only=("sweep",)
    )
    search_s: float = setting(
        60.0, "sweep --rates=search: seconds that requests come at a rate.", only=("sweep",)
    )
    label: str | None = setting(None, "Name in tables and plots; default: what was measured.")
    output: str | None = setting(None, "JSON file to write; default: jaxserve-bench-WHAT.json.")

    def validate(self) -> None:
        if self.repeats < 1 or self.warmup < 0:
            raise ValueError("--repeats must be at least 1 and --warmup at least 0")
        for name in ("max_concurrency", "timeout_s", "search_s", "ttft_p99_ms", "itl_p99_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # or nan
                raise ValueError(f"--{name}={value}: must be above 0")
        try:
            fields = json.loads(self.extra_body)
        except json.JSONDecodeError:
            fields = None
        if not isinstance(fields, dict):
            raise ValueError(f"--extra_body={self.extra_body}: give a JSON object")


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """Where the report goes."""

    report_dir: str = setting("jaxserve-report", "Folder for index.html and the PNGs.")

    def validate(self) -> None:
        pass

"""What a client saw of its requests, and the figures drawn from it.

Definitions are those of vLLM's serving benchmark, so that numbers compare:
  TTFT  first event with tokens, after the request was sent
  ITL   gaps between events of one request, all requests pooled
  TPOT  (last event - first event) / (output tokens - 1), one value a request
  E2E   last event, after the request was sent
Percentiles interpolate linearly. Times here are seconds, in results milliseconds.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

from jaxserve.bench.settings import BenchConfig


@dataclasses.dataclass
class Record:
    """One request as its client saw it; all times on one clock."""

    id: str
    sent: float
    wanted: int  # output tokens asked for
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    stamps: list[float] = dataclasses.field(default_factory=list)  # events that brought tokens
    error: str | None = None
    estimated: bool = False  # output_tokens, for want of the server's own word

    @property
    def good(self) -> bool:
        return self.error is None and bool(self.stamps)

    @property
    def ttft(self) -> float:
        return self.stamps[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.stamps[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """None for a single token: nothing came after the first."""
        if self.output_tokens < 2:
            return None
        return (self.stamps[-1] - self.stamps[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.stamps, self.stamps[1:])]


@dataclasses.dataclass(frozen=True)
class Targets:
    """Bounds in milliseconds that a request must keep to count as served well; None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def of(cls, bench: BenchConfig) -> Targets:
        return cls(bench.ttft_target_ms, bench.tpot_target_ms, bench.e2e_target_ms)

    def met_by(self, record: Record) -> bool:
        seen = (record.ttft, record.tpot or 0.0, record.e2e)
        bounds = (self.ttft_ms, self.tpot_ms, self.e2e_ms)
        return all(bound is None or value * 1000 <= bound for value, bound in zip(seen, bounds))


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in milliseconds; None of no values."""
    if not len(seconds):
        return None
    ms = np.asarray(seconds, np.float64) * 1000
    cuts = {f"p{p}": float(np.percentile(ms, p)) for p in (50, 90, 95, 99)}
    return {"mean": float(ms.mean()), **cuts, "max": float(ms.max())}


def summarise(
    records: Sequence[Record], targets: Targets = Targets(), joules: float | None = None
) -> dict:
    """Figures of one run. Rates are over the time from the first request sent to the last event.

    A failed request counts in `failed` alone; `short` counts those that ended before their length,
    `estimated` those whose tokens the server did not count. Goodput needs a target, and
    joules_per_token the joules used meanwhile.
    """
    good = [record for record in records if record.good]
    result = {"requests": len(records), "failed": len(records) - len(good)}
    errors = [record.error for record in records if record.error]
    if errors:
        result["first_error"] = errors[0]
    if not good:
        return result
    seconds = max(r.stamps[-1] for r in good) - min(r.sent for r in records)
    output = sum(r.output_tokens for r in good)
    prompt = sum(r.prompt_tokens for r in good)
    tpots = [r.tpot for r in good if r.tpot is not None]
    if targets != Targets():
        result["goodput_per_s"] = sum(map(targets.met_by, good)) / seconds
    if joules is not None:
        result["joules_per_token"] = joules / max(output, 1)
    return result | {
        "short": sum(r.output_tokens < r.wanted for r in good),
        "estimated": sum(r.estimated for r in good),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_share": sum(r.cached_tokens for r in good) / max(prompt, 1),
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (output + prompt) / seconds,
        "decode_tokens_per_s": 1 / statistics.median(tpots) if tpots and min(tpots) > 0 else None,
        "ttft_ms": spread([r.ttft for r in good]),
        "tpot_ms": spread(tpots),
        "itl_ms": spread([gap for r in good for gap in r.gaps]),
        "e2e_ms": spread([r.e2e for r in good]),
    }


def request_rows(records: Sequence[Record]) -> dict[str, list]:
    """Records by column, in seconds from the first one sent: enough for every plot."""
    origin = min((r.sent for r in records), default=0.0)
    good = [r for r in records if r.good]
    return {
        "sent": [round(r.sent - origin, 6) for r in good],
        "ttft": [round(r.ttft, 6) for r in good],
        "e2e": [round(r.e2e, 6) for r in good],
        "prompt_tokens": [r.prompt_tokens for r in good],
        "output_tokens": [r.output_tokens for r in good],
        "gaps": [round(gap, 6) for r in good for gap in r.gaps],
    }


_ADDED_UP = ("failed", "short", "estimated")  # a median could hide them


def median_of(runs: Sequence[dict]) -> dict:
    """Number by number, the median over runs, or for what went wrong the sum; what is not a number
    in all of them is left out."""
    merged = {}
    for name in runs[0]:
        values = [run.get(name) for run in runs]
        if all(isinstance(value, dict) for value in values):
            merged[name] = median_of(values)
        elif all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
            merged[name] = sum(values) if name in _ADDED_UP else statistics.median(values)
    return merged

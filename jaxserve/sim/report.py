"""What a simulated or real run was like: distributions, never one mean alone."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

_LOWEST_S, _STEPS_PER_DECADE = 1e-4, 200  # 1.2 % wide buckets from 0.1 ms
_NUM_BUCKETS = 9 * _STEPS_PER_DECADE  # to 28 hours


class Histogram:
    """Durations in buckets of 1.2 %: memory does not grow with what is recorded."""

    def __init__(self):
        self.counts = np.zeros(_NUM_BUCKETS, np.int64)
        self.total = 0.0

    def __len__(self) -> int:
        return int(self.counts.sum())

    def add(self, seconds: np.ndarray) -> None:
        if not len(seconds):
            return
        first = float(seconds[0])
        if np.count_nonzero(seconds == first) == len(seconds):  # as nearly always in a step
            self.total += first * len(seconds)
            self.counts[_bucket(first)] += len(seconds)
        else:
            self.total += float(seconds.sum())
            self.counts += np.bincount(_buckets(seconds), minlength=_NUM_BUCKETS)

    def add_one(self, seconds: float) -> None:
        self.total += seconds
        self.counts[_bucket(seconds)] += 1

    def quantile(self, share: float) -> float:
        """Seconds below which this share lies, right to half a bucket. nan when empty."""
        cumulative = np.cumsum(self.counts)
        if not cumulative[-1]:
            return float("nan")
        bucket = int(np.searchsorted(cumulative, share * cumulative[-1]))
        return self.middle(bucket)

    @staticmethod
    def middle(bucket: int) -> float:
        """Seconds in the middle of a bucket."""
        return _LOWEST_S * 10 ** ((bucket + 0.5) / _STEPS_PER_DECADE)

    @property
    def mean(self) -> float:
        return self.total / len(self) if len(self) else float("nan")

    def summary(self) -> dict[str, float]:
        return {f"p{int(100 * q)}": self.quantile(q) for q in (0.5, 0.9, 0.99)}


def _bucket(seconds: float) -> int:
    decades = math.log10(max(seconds, _LOWEST_S) / _LOWEST_S)
    return min(int(decades * _STEPS_PER_DECADE), _NUM_BUCKETS - 1)


def _buckets(seconds: np.ndarray) -> np.ndarray:
    decades = np.log10(np.maximum(seconds, _LOWEST_S) / _LOWEST_S)
    return np.minimum(decades * _STEPS_PER_DECADE, _NUM_BUCKETS - 1).astype(np.int64)


@dataclasses.dataclass
class Latencies:
    """Of one group of requests: to the first token, between tokens, to the end."""

    ttft: Histogram = dataclasses.field(default_factory=Histogram)
    itl: Histogram = dataclasses.field(default_factory=Histogram)
    e2e: Histogram = dataclasses.field(default_factory=Histogram)
    good: int = 0  # requests within their targets
    output_tokens: int = 0

    def summary(self) -> dict:
        return {
            "requests": len(self.e2e),
            "output_tokens": self.output_tokens,
            "ttft_s": self.ttft.summary(),
            "itl_s": self.itl.summary(),
            "e2e_s": self.e2e.summary(),
            "goodput": self.good / len(self.e2e) if len(self.e2e) else float("nan"),
        }


@dataclasses.dataclass
class Report:
    """One run. groups: "all", "short" (prompts under 512 tokens), and one for each tenant."""

    policy: str
    groups: dict[str, Latencies] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0  # of the simulated clock
    busy_seconds: float = 0.0
    steps: int = 0
    slot_seconds: float = 0.0  # occupied slots, integrated over busy time
    slots: int = 0
    preemptions: int = 0
    refusals: int = 0
    computed_tokens: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0

    def group(self, name: str) -> Latencies:
        if name not in self.groups:
            self.groups[name] = Latencies()
        return self.groups[name]

    def summary(self) -> dict:
        """Plain values, for JSON."""
        everyone = self.group("all")
        return {
            "policy": self.policy,
            "seconds": self.seconds,
            "utilisation": self.busy_seconds / self.seconds if self.seconds else 0.0,
            "output_tokens_per_s": everyone.output_tokens / self.seconds if self.seconds else 0.0,
            "slot_occupancy": self.slot_seconds / (self.busy_seconds * self.slots or 1.0),
            "steps": self.steps,
            "preemptions": self.preemptions,
            "refusals": self.refusals,
            "computed_tokens": self.computed_tokens,
            "prefix_hit_rate": self.hit_tokens / self.query_tokens if self.query_tokens else 0.0,
            "groups": {name: group.summary() for name, group in sorted(self.groups.items())},
        }

    def lines(self) -> list[str]:
        """For a terminal."""
        s = self.summary()
        out = [
            f"policy {s['policy']}: {s['seconds']:.1f} s, busy {s['utilisation']:.0%}, "
            f"{s['output_tokens_per_s']:.1f} output tokens/s, "
            f"slots {s['slot_occupancy']:.0%} full, {s['preemptions']} preemptions, "
            f"{s['refusals']} refused, "
            f"prefix hits {s['prefix_hit_rate']:.0%}",
            f"{'':12} {'requests':>8} {'ttft p50':>10} {'p90':>9} {'p99':>9} {'itl p50':>10} "
            f"{'p99':>9} {'e2e p50':>10} {'p99':>9} {'goodput':>8}",
        ]
        for name, group in s["groups"].items():
            ttft, itl, e2e = group["ttft_s"], group["itl_s"], group["e2e_s"]
            out.append(
                f"{name:12} {group['requests']:8} {ttft['p50']:9.3f}s {ttft['p90']:8.3f}s "
                f"{ttft['p99']:8.3f}s {1e3 * itl['p50']:8.1f}ms {1e3 * itl['p99']:7.1f}ms "
                f"{e2e['p50']:9.2f}s {e2e['p99']:8.2f}s {group['goodput']:8.1%}"
            )
        return out

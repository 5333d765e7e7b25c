"""Pictures of policy against policy. Needs matplotlib, which serving does not."""

from __future__ import annotations

import pathlib

import numpy as np

from jaxserve.sim.report import Histogram, Report

_PANELS = (("ttft", "time to first token"), ("itl", "gap between tokens"), ("e2e", "to the end"))


def compare(reports: list[Report], path: pathlib.Path, group: str = "all") -> None:
    """Share of requests served within a time, one line a policy, one panel a kind of time."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(_PANELS)), _PANELS):
        for report in reports:
            seconds, share = _distribution(getattr(report.group(group), name))
            axes.plot(seconds, share, label=report.policy)
        axes.set_xscale("log")
        axes.set_xlabel("seconds")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel(f"share of {group}")
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def _distribution(histogram: Histogram) -> tuple[np.ndarray, np.ndarray]:
    used = np.flatnonzero(histogram.counts)
    if not len(used):
        return np.array([]), np.array([])
    shares = np.cumsum(histogram.counts)[used] / len(histogram)
    return Histogram.middle(used), shares

"""Pictures of measurements. Needs matplotlib, which serving does not."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np

from jaxserve.bench import record
from jaxserve.bench.run import cell

try:
    from matplotlib import ticker
    from matplotlib.figure import Figure
except ImportError as error:
    raise ValueError("plots need matplotlib: pip install 'jaxserve[plots]'") from error

_LATENCIES = (
    ("ttft", "time to first token"),
    ("gaps", "gap between tokens"),
    ("e2e", "to the end"),
)
_MAX_LEGEND = 48  # characters of a label
_AT_ONCE_S = 0.05  # after a step; one that starts later had nothing to follow


def draw(documents: Sequence[dict]) -> Iterator[tuple[str, str, Figure]]:
    """(name, caption, figure) of every picture these documents have data for. What different
    workloads asked for is not compared: each has pictures of its own."""
    groups = record.by_workload(documents)
    for title, group in groups.items():
        of = f"{title}: " if len(groups) > 1 else ""
        end = f"-{_file_name(title)}" if len(groups) > 1 else ""
        for name, caption, figure in _of_workload(group):
            yield name + end, of + caption, figure
    grown = [d for d in documents if d["kind"] == "growth"]
    if grown:
        yield "growth", "How cost grows, and the line from the knee on.", _growth(grown)
    starts = [d for d in documents if d["kind"] == "startup"]
    if starts:
        yield "startup", "Command line to first token, seconds.", _starts(starts)


def _of_workload(documents: Sequence[dict]) -> Iterator[tuple[str, str, Figure]]:
    rated = [d for d in documents if "output_tokens_per_s" in d["median"] and "rate" not in d]
    if rated:
        yield "throughput", "Output tokens a second: medians, and every run.", _throughput(rated)
        caption = "Share of requests served within a time, all runs."
        yield "latency", caption, _distributions(rated)
    swept = [d for d in documents if "rate" in d and d["median"].get("ttft_ms")]
    if swept:
        yield "rates", "Latency against the load asked for: p50 solid, p99 dashed.", _rates(swept)
    searched = [d for d in documents if "highest_rate" in d["median"]]
    if searched:
        yield "capacity", "The highest rate whose p99s keep within bounds.", _capacity(searched)
    stepped = [d for d in documents if "step_columns" in d["runs"][0]]
    if stepped:
        yield "steps", "Rows that compute and pages in use, over the first run.", _steps(stepped)


def _file_name(title: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", title)


def _label(document: dict) -> str:
    label = document["label"]
    return label if len(label) <= _MAX_LEGEND else f"{label[: _MAX_LEGEND - 1]}…"


def _bars(axes, documents, values_of) -> None:
    """A bar for each document's median with a dot for each of its runs."""
    for place, document in enumerate(documents):
        values = values_of(document)
        axes.barh(place, np.median(values), color=f"C{place % 10}", alpha=0.7)
        axes.plot(values, [place] * len(values), "k.", markersize=4)
        text = f" {cell(float(np.median(values)))}"
        axes.annotate(text, (max(values), place), verticalalignment="center")
    axes.set_yticks(range(len(documents)), [_label(d) for d in documents])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(axis="x", alpha=0.3)


def _throughput(documents) -> Figure:
    return _ranking(documents, "output_tokens_per_s", "output tokens/s")


def _capacity(documents) -> Figure:
    return _ranking(documents, "highest_rate", "requests/s")


def _ranking(documents, name: str, unit: str) -> Figure:
    figure = Figure(figsize=(9, 1.2 + 0.5 * len(documents)), layout="constrained")
    axes = figure.subplots()
    _bars(axes, documents, lambda d: [run[name] for run in d["runs"]])
    axes.set_xlabel(unit)
    return figure


def _distributions(documents) -> Figure:
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(_LATENCIES), sharey=True), _LATENCIES):
        ends = []
        for document in documents:
            runs = (run["request_columns"][name] for run in document["runs"])
            seconds = np.sort(np.fromiter(itertools.chain.from_iterable(runs), np.float64))
            if not len(seconds):
                continue
            share = np.arange(1, len(seconds) + 1) / len(seconds)
            axes.step(seconds, share, where="post", label=_label(document))
            ends += [*np.quantile(seconds, (0.01, 1.0))]
        axes.set(xscale="log", xlabel="seconds", title=title, ylim=(0, 1.02))
        if ends and max(ends) > 0:
            low = min(end for end in ends if end > 0)
            axes.set_xlim(low * 0.9, max(ends) * 1.1)
            _plain_log(axes.xaxis, max(ends) / low)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share of all")
    _legend_below(figure, figure.axes[0])
    return figure


def _plain_log(axis, ratio: float) -> None:
    """Ticks written as plain numbers, as many as an axis over this ratio has room for: at 1, 2 and
    5 times powers of ten, at 1 and 3 times, or at the powers alone."""
    subs = (1, 2, 5) if ratio < 50 else (1, 3) if ratio < 1000 else (1,)
    axis.set_major_locator(ticker.LogLocator(subs=subs))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _legend_below(figure: Figure, axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")


def _rates(documents) -> Figure:
    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = (("ttft_ms", "time to first token"), ("itl_ms", "gap between tokens"))
    left, right, throughput = figure.subplots(1, 3)
    by_label: dict[str, list[dict]] = {}
    for document in sorted(documents, key=lambda d: d["rate"]):
        by_label.setdefault(_label(document), []).append(document)
    for number, (label, points) in enumerate(by_label.items()):
        rates = [point["rate"] for point in points]
        color = f"C{number % 10}"
        for axes, (name, _) in zip((left, right), panels):
            for cut, style in (("p50", "o-"), ("p99", "o--")):
                axes.plot(rates, [p["median"][name][cut] for p in points], style, color=color)
        tokens = [point["median"]["output_tokens_per_s"] for point in points]
        latency = [point["median"]["tpot_ms"]["p50"] for point in points]
        throughput.plot(tokens, latency, "o-", color=color, label=label)
    for axes, (_, title) in zip((left, right), panels):
        axes.set(title=title, xlabel="requests/s", ylabel="ms", yscale="log")
        low, high = axes.get_ylim()
        _plain_log(axes.yaxis, high / low)
        axes.grid(alpha=0.3)
    throughput.set_ylim(0, 1.1 * throughput.get_ylim()[1])
    throughput.set(title="throughput and latency", xlabel="output tokens/s", ylabel="TPOT p50, ms")
    throughput.grid(alpha=0.3)
    _legend_below(figure, throughput)
    return figure


def _steps(documents) -> Figure:
    figure = Figure(figsize=(12, 2.2 * len(documents) + 0.6), layout="constrained")
    grid = figure.subplots(len(documents), 2, squeeze=False, sharex=True)
    for (rows, pages), document in zip(grid, documents):
        steps = {name: np.asarray(v) for name, v in document["runs"][0]["step_columns"].items()}
        queued = steps["queued"] > 0
        slots = document.get("config", {}).get("num_slots") or int(steps["rows"].max())
        rows.plot(*_over_time(steps, "rows"), linewidth=0.8)
        rows.axhline(slots, color="0.5", linestyle=":", label="slots")
        if queued.any():
            rows.fill_between(
                steps["end"], 0, slots, where=queued, step="pre", alpha=0.12, color="C1",
                label="requests wait",
            )  # fmt: skip
        rows.set(title=_label(document), ylabel="rows", ylim=(0, 1.25 * slots))
        rows.legend(fontsize="small", loc="upper right", ncols=2)
        pages.plot(*_over_time(steps, "pages_used"), color="C2")
        pages.set(title=_label(document), ylabel="pages of KV")
        pages.set_ylim(0, 1.1 * max(steps["pages_used"].max(), 1))
        for axes in (rows, pages):
            axes.yaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
            axes.grid(alpha=0.3)
    for axes in grid[-1]:
        axes.set_xlabel("seconds")
    return figure


def _over_time(steps: dict, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Corners of a column's line over time: what a step had while it ran, 0 between two steps that
    did not follow each other at once."""
    ends, values = steps["end"], steps[name]
    befores = np.concatenate([[0.0], ends[:-1]])
    starts = np.maximum(ends - steps["seconds"], befores)
    follows = starts - befores <= _AT_ONCE_S
    between = np.where(follows, np.concatenate([[0.0], values[:-1]]), 0.0)
    x = np.stack([befores, starts, starts, ends], axis=1)
    y = np.stack([between, between, values, values], axis=1)
    return x.ravel(), y.ravel()


def _growth(documents) -> Figure:
    figure = Figure(figsize=(4.5 * len(documents), 3.6), layout="constrained")
    for axes, document in zip(np.ravel(figure.subplots(1, len(documents))), documents):
        run, axes_of = document["runs"][0], document["axes"]
        x = np.asarray(run["x"], np.float64)
        past = x[x >= run["knee"]]
        axes.plot(x, run["y"], "." if len(x) > 50 else "o", markersize=4)
        line = run["intercept"] + run["slope"] * past
        formula = f"{run['intercept']:.4g} + {run['slope']:.3g} x from {run['knee']:g} on"
        axes.plot(past, line, "--", color="C1", label=formula)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6))
        axes.set(title=_label(document), xlabel=axes_of["x"], ylabel=axes_of["y"])
        axes.set_ylim(0, 1.2 * max(run["y"]))  # room for the legend
        axes.legend(fontsize="small", loc="upper left")
        axes.grid(alpha=0.3)
    return figure


def _starts(documents) -> Figure:
    figure = Figure(figsize=(9, 1.2 + 1.0 * len(documents)), layout="constrained")
    kinds = [(d, kind) for d in documents for kind in ("cold_s", "warm_s")]
    entries = [
        {"label": f"{d['label']}, {kind[:-2]}", "values": [run[kind] for run in d["runs"]]}
        for d, kind in kinds
    ]
    axes = figure.subplots()
    _bars(axes, entries, lambda entry: entry["values"])
    axes.set_xlabel("seconds")
    return figure

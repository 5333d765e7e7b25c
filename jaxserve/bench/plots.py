"""Pictures of measurements. Needs matplotlib, which serving does not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

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
_MAX_LEGEND = 40  # characters of a label


def draw(documents: Sequence[dict]) -> Iterator[tuple[str, str, Figure]]:
    """(name, caption, figure) of every picture these documents have data for."""
    rated = [d for d in documents if "output_tokens_per_s" in d["median"] and "rate" not in d]
    if rated:
        yield "throughput", "Output tokens a second: medians, and every run.", _throughput(rated)
    timed = [d for d in rated if "request_columns" in d["runs"][0]]
    if timed:
        yield "latency", "Share of requests served within a time, all runs.", _distributions(timed)
    swept = [d for d in documents if "rate" in d and "ttft_ms" in d["median"]]
    if swept:
        yield "rates", "Latency against the load asked for: p50 solid, p99 dashed.", _rates(swept)
    searched = [d for d in documents if "highest_rate" in d["median"]]
    if searched:
        yield "capacity", "The highest rate whose p99s keep within bounds.", _capacity(searched)
    stepped = [d for d in documents if "step_columns" in d["runs"][0]]
    if stepped:
        yield "steps", "Rows that compute and pages in use, over the first run.", _steps(stepped)
    grown = [d for d in documents if d["kind"] == "growth"]
    if grown:
        yield "growth", "How cost grows, and the line from the knee on.", _growth(grown)
    starts = [d for d in documents if d["kind"] == "startup"]
    if starts:
        yield "startup", "Command line to first token, seconds.", _starts(starts)


def _label(document: dict) -> str:
    return document["label"][:_MAX_LEGEND]


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
    for axes, (name, title) in zip(figure.subplots(1, len(_LATENCIES)), _LATENCIES):
        lowest = []
        for document in documents:
            runs = (run["request_columns"][name] for run in document["runs"])
            seconds = np.sort(np.fromiter(itertools.chain.from_iterable(runs), np.float64))
            share = np.arange(1, len(seconds) + 1) / max(len(seconds), 1)
            axes.plot(seconds, share, label=_label(document))
            lowest.append(np.quantile(seconds, 0.001))
        axes.set(xscale="log", xlabel="seconds", title=title)
        axes.set_xlim(left=min(lowest) * 0.9)
        _plain_log(axes.xaxis)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share")
    _legend_below(figure, figure.axes[0])
    return figure


def _plain_log(axis) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, written as plain numbers."""
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
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
        _plain_log(axes.yaxis)
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
        rows.step(steps["end"], steps["rows"], where="pre", linewidth=0.8)
        rows.fill_between(
            steps["end"], 0, steps["rows"].max(), where=queued, step="pre", alpha=0.12, color="C1",
            label="requests wait",
        )  # fmt: skip
        rows.set(title=_label(document), ylabel="rows")
        rows.legend(fontsize="small", loc="upper right")
        pages.step(steps["end"], steps["pages_used"], where="pre", color="C2")
        pages.set(title=_label(document), ylabel="pages")
    for axes in grid[-1]:
        axes.set_xlabel("seconds")
    return figure


def _growth(documents) -> Figure:
    figure = Figure(figsize=(4.5 * len(documents), 3.6), layout="constrained")
    for axes, document in zip(np.ravel(figure.subplots(1, len(documents))), documents):
        run, axes_of = document["runs"][0], document["axes"]
        x = np.asarray(run["x"], np.float64)
        past = x[x >= run["knee"]]
        axes.plot(x, run["y"], "." if len(x) > 50 else "o", markersize=4)
        axes.plot(past, run["intercept"] + run["slope"] * past, "--", color="C1")
        axes.set(title=_label(document), xlabel=axes_of["x"], ylabel=axes_of["y"])
        axes.set_ylim(bottom=0)
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

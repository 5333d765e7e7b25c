"""`jaxserve report FILE.json ...`: one self-contained HTML page of measurements, and PNGs."""

from __future__ import annotations

import base64
import collections
import html
import io
import pathlib
from collections.abc import Iterator, Sequence

from jaxserve.bench import record
from jaxserve.bench.run import COLUMNS, cell, figures_of, remarks

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
       color: #1c1e21; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
td, th { padding: .2rem .5rem; border-bottom: 1px solid #ddd; text-align: right;
         white-space: nowrap; }
th { vertical-align: bottom; white-space: pre-line; }
details td:last-child { white-space: normal; text-align: left; }
td:first-child, th:first-child { text-align: left; }
img { max-width: 100%; } figure { margin: 2rem 0; } figcaption { color: #555; }
"""


def write(sources: Sequence[str], folder: pathlib.Path) -> pathlib.Path:
    """Writes index.html and the PNGs into folder; returns the page's path. ValueError for a file
    that is not a measurement, or without matplotlib."""
    from jaxserve.bench import plots

    documents = read_all(sources)
    if not documents:
        raise ValueError("give the JSON files that `jaxserve bench` wrote")
    folder.mkdir(parents=True, exist_ok=True)
    figures = []
    for name, caption, figure in plots.draw(documents):
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=120)
        (folder / f"{name}.png").write_bytes(png.getvalue())
        figures.append((name, caption, png.getvalue()))
    page = folder / "index.html"
    page.write_text(_page(documents, figures), encoding="utf-8")
    return page


def read_all(sources: Sequence[str]) -> list[dict]:
    """The documents of all files; labels that several files use carry the files' names."""
    documents, users = [], collections.defaultdict(set)
    for source in dict.fromkeys(sources):
        for document in record.read(source):
            documents.append((source, document))
            users[document["label"]].add(source)
    return [
        document | {"label": f"{pathlib.Path(source).stem}: {label}"}
        if len(users[label := document["label"]]) > 1
        else document
        for source, document in documents
    ]


def _page(documents: Sequence[dict], figures) -> str:
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>jaxserve bench</title>",
        f"<style>{_STYLE}</style><h1>jaxserve bench</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in _machines(documents)),
        *_tables(documents),
        *(f"<p>{html.escape(line)}</p>" for line in remarks(documents)),
    ]
    for name, caption, png in figures:
        data = base64.b64encode(png).decode()
        parts.append(
            f"<figure><img alt='{name}' src='data:image/png;base64,{data}'>"
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    parts += ["<h2>What was measured</h2>", *map(_facts, documents), "</html>"]
    return "\n".join(parts)


def _machines(documents: Sequence[dict]) -> list[str]:
    """Each machine that measured something, and when."""
    days = collections.defaultdict(list)
    for document in documents:
        machine = document["machine"]
        name = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
        days[name].append(document["made"][:10])
    return [
        f"{name}, {' to '.join(sorted({min(dates), max(dates)}))}" for name, dates in days.items()
    ]


def _tables(documents: Sequence[dict]) -> Iterator[str]:
    """One table for each workload, and for each kind of measurement that has none."""
    groups = record.by_workload(documents)
    asked = {id(document) for group in groups.values() for document in group}
    for document in documents:
        if id(document) not in asked:
            groups.setdefault(document["kind"], []).append(document)
    for title, group in groups.items():
        if len(groups) > 1:
            yield f"<h2>{html.escape(title)}</h2>"
        yield _figures_table(group)


def _figures_table(documents: Sequence[dict]) -> str:
    """A row a document, the figures that any of them has."""
    figures = [figures_of(document) for document in documents]
    names = [name for name in COLUMNS if any(f.get(name) is not None for f in figures)]
    head = _row(["", *(COLUMNS[name].replace(" p50", "\np50") for name in names), "runs"], "th")
    rows = [
        _row([d["label"], *(cell(f.get(name)) for name in names), str(len(d["runs"]))])
        for d, f in zip(documents, figures)
    ]
    return f"<table>{head}{''.join(rows)}</table>"


def _row(cells: Sequence[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"


def _facts(document: dict) -> str:
    """Machine, versions, model and every setting of one measurement, folded away."""
    groups = (
        "machine", "versions", "server", "hardware", "model", "memory", "energy", "config",
        "workload", "bench", "scheduling",
    )  # fmt: skip
    rows = [
        _row([f"{group}: {name}", str(value)])
        for group in groups
        for name, value in document.get(group, {}).items()
    ]
    title = html.escape(f"{document['label']} ({document['kind']}, {document['made']})")
    return f"<details><summary>{title}</summary><table>{''.join(rows)}</table></details>"

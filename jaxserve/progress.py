"""Progress bars for the parts of a start: download, load, compile."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import rich.progress
from rich.console import Console

_TITLES = {
    "download": "Downloading",
    "load": "Loading weights",
    "compile": "Compiling",
    "answer": "Answering",
    "simulate": "Simulating",
    "measure": "Measuring",
}
_COUNTS_BYTES = {"download", "load"}


def ending(report: Callable[[str, int, int], None], item: str, total: int) -> Callable[[], None]:
    """A callback for each of `total` things that end, in the words of report(item, done, total);
    their beginning is reported at once."""
    report(item, 0, total)
    done = itertools.count(1)
    return lambda: report(item, next(done), total)


class Progress:
    """Shows one bar per part as it is reported. Use as a context manager.

    part(name) gives the callback (item, done, total) that the rooms below report to.
    """

    def __init__(self, console: Console | None = None):
        bar = rich.progress
        self._bars = bar.Progress(
            bar.TextColumn("{task.description:<18}"),
            bar.BarColumn(),
            bar.TextColumn("{task.fields[amount]:>16}"),
            bar.TimeElapsedColumn(),
            bar.TextColumn("[dim]{task.fields[item]}"),
            console=console or Console(stderr=True),
            refresh_per_second=4,  # each takes a millisecond from what is measured meanwhile
        )
        self._tasks = {}

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        if self._tasks:
            with contextlib.suppress(OSError):  # a full disk behind stderr is no fault of the start
                self._bars.stop()

    def part(self, name: str) -> Callable[[str, int, int], None]:
        def report(item: str, done: int, total: int) -> None:
            if name not in self._tasks:
                self._bars.start()  # with the first news: an early error stands alone
                self._tasks[name] = self._bars.add_task(_TITLES[name], amount="", item="")
            amount = f"{done}/{total}"
            if name in _COUNTS_BYTES:
                amount = f"{done / 2**20:.0f}/{total / 2**20:.0f} MiB"
            shown = "" if done >= total else item
            task = self._tasks[name]
            if done < self._bars.tasks[task].completed:  # another of the same kind: its own time
                self._bars.reset(task)
            self._bars.update(task, completed=done, total=total, amount=amount, item=shown)

        return report

"""What `jaxserve bench` refuses before it loads anything, and what it says of its figures."""

import dataclasses
import io

import pytest
from rich.console import Console

from jaxserve.bench import run
from jaxserve.bench.settings import BenchConfig, WorkloadConfig
from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.progress import Progress, ending


def job(**settings):
    configs = []
    for kind in (EngineConfig, SchedulerConfig, WorkloadConfig, BenchConfig):
        names = {field.name for field in dataclasses.fields(kind)}
        configs.append(kind(**{k: settings.pop(k) for k in names & settings.keys()}))
    assert not settings
    return run.Job(*configs, console=Console(quiet=True))


@pytest.mark.parametrize(
    ("what", "settings", "words"),
    [
        ("offline", {"base_url": "http://h/v1"}, "--base_url is for bench serve and sweep"),
        ("serve", {"compare": "static"}, "--compare is for bench offline, not serve"),
        ("startup", {"workload": "random"}, "--workload is for bench offline"),
        ("sweep", {"request_rate": 2.0}, "--request_rate is for"),
        ("sweep", {"rates": "fast"}, "--rates=fast"),
        ("sweep", {"rates": "1,inf"}, "--rates=1,inf"),
        ("serve", {"burstiness": 0.5}, "needs a --request_rate"),
        ("serve", {"base_url": "http://h/v1", "num_slots": 4}, "--num_slots=4 is nothing to"),
        ("offline", {"workload": "nope"}, "choose one of random, prefix"),
        ("nothing", {}, "choose one of offline"),
    ],
)
def test_settings_that_would_change_nothing_are_refused(what, settings, words):
    with pytest.raises(ValueError, match=words):
        run.run(job(**settings), what)


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ("offline", {"compare": "static", "ttft_target_ms": 5.0, "num_slots": 4}),
        ("serve", {"base_url": "http://h/v1", "max_model_len": 64, "model": "m.gguf"}),
        ("sweep", {"burstiness": 0.5, "rates": "search"}),
        ("startup", {"repeats": 1, "weight_dtype": "int8"}),
    ],
)
def test_settings_that_matter_pass(what, settings):
    run.check(job(**settings), what)


def test_remarks_say_what_figures_hide():
    served = {
        "output_tokens_per_s": 30.0,
        "occupancy_queued": 1.0,
        "failed": 2,
        "short": 1,
        "estimated": 3,
    }
    runs = [{"failed": 0}, {"failed": 2, "first_error": "503: busy"}]
    nothing = {"source": "", "missing": "no RAPL"}
    documents = [
        {"label": "a", "batching": "continuous", "median": served, "runs": runs, "energy": nothing},
        {"label": "b", "batching": "static", "median": {"output_tokens_per_s": 12.0}, "runs": []},
    ]
    assert [line.split(": ")[-1] for line in run.remarks(documents)] == [
        "continuous batching serves 2.50 times the tokens/s of static",
        "busy",
        "1 answers ended before the length asked for",
        "the server did not count the tokens of 3 answers; they are counted from the text, with "
        "--model's tokenizer",
        "no RAPL",
    ]


def test_batching_compares_only_where_requests_wait():
    seen = {"output_tokens_per_s": 30.0}
    documents = [{"label": b, "batching": b, "median": seen} for b in ("continuous", "static")]
    (line,) = run.remarks(documents)
    assert "no request waited" in line


def test_many_columns_become_several_tables():
    console = Console(width=80, record=True, file=io.StringIO())
    run.show([{"label": "a server", "median": {"failed": n}, "rate": n} for n in range(7)], console)
    text = console.export_text()
    assert text.count("rate/s") == 3 and max(map(len, text.splitlines())) <= 80


def test_progress_starts_again_with_each_run():
    shown = io.StringIO()
    with Progress(Console(file=shown, force_terminal=True, width=100)) as progress:
        for number in (1, 2):
            on_end = ending(progress.part("measure"), f"run {number}", 2)
            on_end()
        (task,) = progress._bars.tasks
        assert (task.completed, task.fields["item"], task.finished) == (1, "run 2", False)
        on_end()
        assert task.finished
        ending(progress.part("measure"), "run 3", 2)
        assert (task.completed, task.finished) == (0, False)

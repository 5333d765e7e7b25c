"""JSON documents: written, read back, and drawn."""

import numpy as np
import pytest

from jaxserve.bench import process, record, report, settings
from jaxserve.bench.metrics import Record, request_rows, summarise
from jaxserve.config import EngineConfig, SchedulerConfig

RECORDS = [
    Record("a", 0.0, 3, prompt_tokens=5, output_tokens=3, stamps=[0.1, 0.2, 0.4]),
    Record("b", 0.1, 2, prompt_tokens=7, output_tokens=2, stamps=[0.3, 0.5]),
]
STEPS = {
    "end": np.array([0.1, 0.2]), "seconds": np.array([0.1, 0.1]), "rows": np.array([2.0, 1.0]),
    "queued": np.array([1.0, 0.0]), "pages_used": np.array([3.0, 1.0]),
}  # fmt: skip


def documents():
    run = summarise(RECORDS) | {"request_columns": request_rows(RECORDS)}
    sweep = [record.document("sweep", "<b>server</b>", [run], rate=rate) for rate in (0.5, 1.0)]
    stepped = run | {"step_columns": STEPS, "occupancy_queued": 0.97}
    starts = [{"cold_s": 20.0, "warm_s": 5.0}, {"cold_s": 22.0, "warm_s": 6.0}]
    return [
        record.document("offline", "ours", [stepped, stepped], config={"model": "demo"}),
        record.document("serve", "theirs", [run]),
        record.document("startup", "demo", starts),
        *sweep,
        record.document("search", "ours", [{"highest_rate": 6.5}, {"highest_rate": 7.0}]),
    ]


def test_document_says_what_it_takes_to_judge_it():
    document = documents()[2]
    assert document["median"] == {"cold_s": 21.0, "warm_s": 5.5}
    assert document["machine"]["cores"] >= 1 and document["machine"]["memory_gib"] > 0
    assert document["versions"].keys() >= {"python", "jaxserve", "jax", "numpy"}
    assert document["made"].endswith("+00:00")


def test_written_and_read(tmp_path):
    path = tmp_path / "b.json"
    record.write(path, documents())
    back = record.read(path)
    assert [d["label"] for d in back] == [d["label"] for d in documents()]
    assert back[0]["runs"][0]["request_columns"]["ttft"] == [0.1, 0.2]
    assert back[0]["runs"][0]["step_columns"]["rows"] == [2.0, 1.0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"results": []}',
        '{"jaxserve_bench": 1, "results": [{}]}',
        '{"jaxserve_bench": 1, "results": [1]}',
    ],
)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json"):
        record.read(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.json: there is no such file"):
        record.read(tmp_path / "gone.json")


def test_report_is_one_page_that_needs_nothing_else(tmp_path):
    pytest.importorskip("matplotlib")
    source = tmp_path / "b.json"
    record.write(source, documents())
    page = report.write([str(source)], tmp_path / "out")
    text = page.read_text()
    names = {"throughput", "latency", "rates", "capacity", "steps", "startup"}
    for name in names:
        png = (tmp_path / "out" / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 5000
    assert text.count("src='data:image/png;base64,") == len(names)
    assert "http" not in text.replace("http-equiv", "")
    assert "<b>server" not in text and "&lt;b&gt;server" in text


def test_workloads_are_not_compared_with_each_other(tmp_path):
    pytest.importorskip("matplotlib")
    run = summarise(RECORDS) | {"request_columns": request_rows(RECORDS)}
    asked = ({"workload": "random"}, {"workload": "a/w2.json"}, {"workload": "random", "seed": 8})
    for name, workloads in (("one", asked), ("two", asked[:1])):
        made = [record.document("serve", "a server", [run], workload=w) for w in workloads]
        record.write(tmp_path / f"{name}.json", made)
    sources = [str(tmp_path / f"{name}.json") for name in ("one", "two")]
    found = record.by_workload(report.read_all([*sources, sources[0]]))  # one of them twice
    labels = {title: [document["label"] for document in group] for title, group in found.items()}
    assert labels == {
        "random": ["one: a server", "two: a server"],
        "random, seed=8": ["one: a server"],
        "w2": ["one: a server"],
    }
    page = report.write(sources, tmp_path / "out").read_text()
    assert [page.count(f"<h2>{title}</h2>") for title in labels] == [1, 1, 1]
    assert (tmp_path / "out" / "latency-random-seed-8.png").exists()


def test_lines_over_time_fall_to_nothing_between_steps():
    plots = pytest.importorskip("jaxserve.bench.plots")
    steps = {
        "end": np.array([1.0, 2.0, 9.0]), "seconds": np.array([1.0, 1.0, 1.0]),
        "rows": np.array([3.0, 2.0, 4.0]),
    }  # fmt: skip
    x, y = plots._over_time(steps, "rows")
    assert x.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 8, 8, 9]
    assert y.tolist() == [0, 0, 3, 3, 3, 3, 2, 2, 0, 0, 4, 4]


def test_flags_name_what_is_not_default():
    config = EngineConfig(num_slots=4, prefix_caching=False)
    flags = process.flags_of(config, SchedulerConfig())
    assert flags == ["--num_slots=4", "--prefix_caching=false"]


def test_settings_refuse_nonsense():
    with pytest.raises(ValueError, match="request_rate"):
        settings.WorkloadConfig(request_rate=-1.0).validate()
    with pytest.raises(ValueError, match="repeats"):
        settings.BenchConfig(repeats=0).validate()
    for text in ("x", "[]"):
        with pytest.raises(ValueError, match="JSON object"):
            settings.BenchConfig(extra_body=text).validate()

"""Offline batches: OpenAI's format in and out, failures kept to their line, resumption."""

import io
import json
import os

import pytest
from fake_engine import BOS, FakeEngine, text_of
from rich.console import Console

from jaxserve.progress import Progress
from jaxserve.server import batch
from jaxserve.types import EngineFailed


def line(i, **body):
    body = {"prompt": f"p{i}", "max_tokens": 4} | body
    return {"custom_id": f"id-{i}", "method": "POST", "url": "/v1/completions", "body": body}


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(source, target, engine, **arguments):
    return batch.run(list(batch.read_lines(source)), target, engine, **arguments)


def read(path):
    return {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_answers_and_failures_by_line(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}}  # fmt: skip
    write(source, [line(0), line(1, temperature="hot"), chat])
    shown = io.StringIO()
    with Progress(Console(file=shown, force_terminal=True)) as progress:
        failed = run(source, target, FakeEngine(), progress=progress.part("answer"))
    assert failed == 1 and "3/3" in shown.getvalue()
    results = read(target)
    good = results["id-0"]["response"]
    assert good["status_code"] == 200 and good["request_id"]
    assert good["body"]["choices"][0]["text"] == text_of([BOS, *b"p0"], 4)
    bad = results["id-1"]["response"]
    assert bad["status_code"] == 400 and bad["body"]["error"]["param"] == "temperature"
    assert results["chat"]["response"]["body"]["object"] == "chat.completion"


def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, [line(i) for i in range(5)])
    run(source, target, FakeEngine())
    whole = read(target)
    kept = target.read_text().splitlines(keepends=True)[:3]
    target.write_text("".join(kept) + '{"id":"batch_req_1","custom_id":"id-')  # torn
    engine = FakeEngine()
    assert run(source, target, engine) == 0
    assert len(engine.calls) == 2
    text = lambda results: {
        name: result["response"]["body"]["choices"][0]["text"] for name, result in results.items()
    }
    assert text(read(target)) == text(whole)


def test_a_line_that_failed_before_still_counts(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, [line(0), line(1, temperature="hot")])
    assert [run(source, target, FakeEngine()) for _ in range(2)] == [1, 1]
    assert len(target.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "text", ["my notes\n", "my notes", json.dumps(line(0)) + "\n", "{}\n", "\n"]
)
def test_a_file_that_holds_something_else_is_not_touched(tmp_path, text):
    source, target = tmp_path / "in.jsonl", tmp_path / "notes"
    write(source, [line(0)])
    target.write_text(text)
    engine = FakeEngine()
    with pytest.raises(ValueError, match="notes:1 is no answer of a batch"):
        run(source, target, engine)
    assert target.read_text() == text and engine.calls == []


def test_marks_of_other_systems_are_passed_over(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = "\r\n".join(["\ufeff" + json.dumps(line(0)), "", json.dumps(line(1))])
    source.write_bytes(lines.encode())
    assert run(source, target, FakeEngine()) == 0 and len(read(target)) == 2


def test_answers_go_into_a_pipe(tmp_path):
    source, pipe = tmp_path / "in.jsonl", tmp_path / "pipe"
    write(source, [line(0), line(1)])
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run(source, pipe, FakeEngine()) == 0
        assert len(os.read(reader, 1 << 16).splitlines()) == 2
    finally:
        os.close(reader)


def test_a_full_queue_is_waited_for(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, [line(0)])
    engine = FakeEngine(max_queued=4)
    readings = iter([9, 9, 0])
    stats = engine.stats

    def busy_at_first():
        engine.counts.waiting = next(readings, 0)
        return stats()

    engine.stats = busy_at_first
    assert run(source, target, engine) == 0


def test_an_engine_that_has_ended_ends_the_run_and_keeps_what_is_done(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, [line(0), line(1)])
    engine = FakeEngine()
    run(source, target, engine)
    write(source, [line(0), line(1), line(2)])
    engine.state = "dead"
    with pytest.raises(EngineFailed, match="dead"):
        run(source, target, engine)
    assert len(read(target)) == 2


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("nonsense\n", "in.jsonl:1 is not JSON"),
        ('{"custom_id": 5}\n', "no custom_id"),
        (json.dumps(line(0)) + "\n\n" + json.dumps(line(0)) + "\n", "in.jsonl:3.*came before"),
        (json.dumps(line(0) | {"url": "/metrics"}), "url must be one of"),
        (json.dumps(line(0, stream=True)), "without stream"),
    ],
)
def test_bad_lines_are_told_by_number(tmp_path, text, complaint):
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        list(batch.read_lines(source))

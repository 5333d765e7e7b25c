"""Workloads: the same seed gives the same requests, of the shape that was asked for."""

import dataclasses
import itertools
import json
import statistics

import pytest

from jaxserve.bench import workload
from jaxserve.bench.settings import WorkloadConfig

VOCAB = 500


class WordTokenizer:
    """Every third id is a word, the rest are not."""

    vocab_size = VOCAB

    def token_text(self, token):
        letters = "".join(chr(97 + int(d)) for d in f"{token:03d}")
        return f" {letters}" if token % 3 == 0 else f"{token}!"

    def encode(self, text):
        return [3 * len(word) for word in text.split()]


def made(name, max_len=2048, **settings):
    return workload.make(WorkloadConfig(workload=str(name), **settings), WordTokenizer(), max_len)


@pytest.mark.parametrize("name", ["random", "prefix", "sessions", "skewed", "poisson"])
def test_seed_decides_everything(name):
    assert made(name, num_requests=12) == made(name, num_requests=12)
    assert made(name, num_requests=12) != made(name, num_requests=12, seed=8)
    for item in made(name, num_requests=12).items:
        assert all(token % 3 == 0 for token in item.prompt_ids), "not a word"


def test_random_lengths():
    items = made("random", num_requests=200, input_len=100, output_len=10).items
    lengths = [len(item.prompt_ids) for item in items]
    assert min(lengths) >= 50 and max(lengths) <= 150
    assert statistics.mean(lengths) == pytest.approx(100, rel=0.1)
    assert {item.max_tokens for item in items} == set(range(5, 16))


def test_skewed_is_mostly_short():
    items = made("skewed").items
    assert len(items) == 64 and all(item.arrival == 0 for item in items)
    assert all(16 <= len(i.prompt_ids) <= 512 and 8 <= i.max_tokens <= 256 for i in items)
    assert statistics.median(i.max_tokens for i in items) < 40 < max(i.max_tokens for i in items)


def test_prefix_is_shared_and_ends_differ():
    first, second, *_ = made("prefix", num_requests=4, input_len=64).items
    assert first.prompt_ids[:64] == second.prompt_ids[:64]
    assert len(first.prompt_ids) == 80 and first.prompt_ids[64:] != second.prompt_ids[64:]


def test_sessions_grow_turn_by_turn():
    items = made("sessions", num_requests=8, input_len=32, output_len=16).items
    assert len(items) == 8 and items[0].after is None and items[4].after is None
    for before, after in itertools.pairwise(items[:4]):
        assert after.after == before.id
        assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
        assert len(after.prompt_ids) == len(before.prompt_ids) + 32


def test_arrivals_keep_rate_and_burstiness():
    config = WorkloadConfig(request_rate=4.0)
    times = workload.arrivals(4000, config)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0 and statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)  # Poisson: as long as the mean
    bursty = workload.arrivals(4000, dataclasses.replace(config, burstiness=0.25))
    gaps = [b - a for a, b in itertools.pairwise(bursty)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.15)
    assert statistics.stdev(gaps) == pytest.approx(0.5, rel=0.15)  # 1 / sqrt(0.25) times the mean
    assert [i.arrival for i in made("prefix", num_requests=3, request_rate=4.0).items] == times[:3]


def test_trace_blocks_become_shared_prefixes(tmp_path):
    path = tmp_path / "mooncake_synthetic.jsonl"  # a published trace's name
    rows = [
        {"arrival_s": 0.0, "input_tokens": 1030, "output_tokens": 5, "hash_ids": [1, 2, 3]},
        {"arrival_s": 2.5, "input_tokens": 700, "output_tokens": 90_000, "hash_ids": [1, 9]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = made(path, max_len=2000).items
    assert (len(first.prompt_ids), first.max_tokens, first.arrival) == (1030, 5, 0.0)
    assert (len(second.prompt_ids), second.max_tokens, second.arrival) == (700, 1000, 2.5)
    assert first.prompt_ids[:512] == second.prompt_ids[:512]
    assert first.prompt_ids[512:700] != second.prompt_ids[512:]


def test_any_file_of_lengths_is_a_trace(tmp_path):
    """Without arrivals all come at once; what is too long is cut, and counted."""
    path = tmp_path / "mine.csv"
    path.write_text("input_tokens,output_tokens\n30,5\n900,7\n20,600\n")
    found = made(path, max_len=500)
    assert [(len(i.prompt_ids), i.max_tokens) for i in found.items] == [
        (30, 5),
        (493, 7),
        (20, 250),
    ]
    assert found.cut == 2 and str(found) == (
        "mine: 3 requests, 543 tokens in, 262 out; 2 cut to the model's length"
    )
    assert len(made(path, max_len=2000, num_requests=1).items) == 1


@pytest.mark.parametrize(
    "name, text, reason",
    [
        ("w.csv", "a,b\n1,2\n", "not a trace"),
        ("w.csv", "input_tokens,output_tokens\n", "no requests"),
        ("w.csv", "", "no requests"),
        ("w.csv", "input_tokens,output_tokens\n-5,6\n", "numbers from 0"),
        ("w.csv", "input_tokens,output_tokens,arrival_s\n5,6,inf\n", "numbers from 0"),
        ("w.jsonl", '{"input_tokens": 5, "output_tokens": 6, "arrival_s": NaN}', "numbers from 0"),
        ("w.jsonl", '{"input_tokens": 5, "output_tokens": 6, "hash_ids": [-1]}', "w.jsonl: not a"),
        ("w.jsonl", '{"prompt_ids": [1], "arrival_s": NaN}', "arrival_s must be a number from 0"),
    ],
)
def test_broken_traces_are_refused(tmp_path, name, text, reason):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        made(path)


def test_marks_and_empty_lines_in_traces_are_passed_over(tmp_path):
    path = tmp_path / "excel.csv"
    path.write_bytes("\ufeffinput_tokens,output_tokens\r\n5,6\r\n\r\n".encode())
    assert len(made(path).items) == 1
    path = tmp_path / "lines.jsonl"
    path.write_text('{"input_tokens": 5, "output_tokens": 6}\n\n' * 2)
    assert len(made(path).items) == 2


@pytest.mark.parametrize(
    "file",
    [
        "azure_llm_2023_conv.csv", "azure_llm_2023_code.csv", "mooncake_conversation.jsonl",
        "mooncake_synthetic.jsonl", "burstgpt3_head145_sessions.csv",
        "aibrix_sharegpt_8min_lengths.csv", "arxiv_summarization_lengths.csv",
    ],
)  # fmt: skip
def test_published_traces(shared, file):
    found = made(shared / "traces" / file, num_requests=5)
    assert len(found.items) == 5 and all(item.prompt_ids for item in found.items)


def test_files_of_requests(tmp_path):
    rows = [
        {"prompt": "a bb ccc", "max_tokens": 4, "arrival_s": 1.5},
        {"prompt_ids": [7, 8], "id": "mine"},
    ]
    lines = tmp_path / "asked.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n")
    first, second = made(lines, output_len=9).items
    assert first == workload.Item("asked-0", (3, 6, 9), 4, 1.5, prompt="a bb ccc")
    assert second == workload.Item("mine", (7, 8), 9)
    document = tmp_path / "w.json"
    document.write_text(json.dumps({"name": "w2", "requests": rows}))
    assert made(document, output_len=9).name == "w2" and len(made(document).items) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not a file of requests"),
        ('{"requests": 3}', "not a file of requests"),
        ('{"requests": [{"max_tokens": 1}]}', "not a file of requests"),
        ('{"requests": []}', "no requests"),
        ('{"requests": [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}]}', "the same id"),
        ('{"requests": [{"prompt": "a", "max_tokens": 0}]}', "at least 1"),
    ],
)
def test_broken_files_are_refused(tmp_path, text, reason):
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        made(path)


def test_refusals_say_what_to_do():
    with pytest.raises(ValueError, match="skewed"):
        made("nothing_of_the_kind")
    with pytest.raises(ValueError, match="no such file"):
        made("nowhere.jsonl")
    with pytest.raises(ValueError, match="--max_model_len"):
        made("prefix", max_len=128)

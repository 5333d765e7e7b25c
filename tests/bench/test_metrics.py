"""Figures against event lists worked out by hand."""

import math

import pytest

from jaxserve.bench.metrics import Record, Targets, median_of, spread, summarise


def record(sent, stamps, tokens, *, prompt=10, wanted=None, error=None, cached=0):
    return Record(
        "r",
        sent,
        wanted=tokens if wanted is None else wanted,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=tokens,
        stamps=list(stamps),
        error=error,
    )


def test_one_request():
    one = record(10.0, [10.5, 10.6, 10.8, 11.3], 5)  # the last event brought two tokens
    assert one.ttft == pytest.approx(0.5)
    assert one.e2e == pytest.approx(1.3)
    assert one.tpot == pytest.approx(0.8 / 4)  # over tokens
    assert one.gaps == pytest.approx([0.1, 0.2, 0.5])  # over events
    assert record(0.0, [1.0], 1).tpot is None


def test_spread_interpolates():
    result = spread([0.001, 0.002, 0.003, 0.004])
    assert result["mean"] == pytest.approx(2.5) and result["p50"] == pytest.approx(2.5)
    assert result["p90"] == pytest.approx(3.7) and result["p99"] == pytest.approx(3.97)
    assert result["max"] == pytest.approx(4.0)
    assert spread([]) is None


def test_summary_of_a_run():
    records = [
        record(0.0, [1.0, 2.0, 3.0], 3, prompt=100, cached=50),
        record(1.0, [2.0, 4.0], 2, prompt=20, wanted=4),
        record(0.5, [], 0, error="ApiError: 503"),
    ]
    result = summarise(records, Targets(ttft_ms=1000.0, tpot_ms=1500.0))
    assert (result["requests"], result["failed"], result["short"]) == (3, 1, 1)
    assert result["first_error"] == "ApiError: 503"
    assert result["seconds"] == pytest.approx(4.0)  # first sent at 0, last event at 4
    assert result["output_tokens"] == 5 and result["prompt_tokens"] == 120
    assert result["output_tokens_per_s"] == pytest.approx(5 / 4)
    assert result["total_tokens_per_s"] == pytest.approx(125 / 4)
    assert result["requests_per_s"] == pytest.approx(2 / 4)
    assert result["cached_share"] == pytest.approx(50 / 120)
    assert result["goodput_per_s"] == pytest.approx(1 / 4)  # the second took 2 s a token
    assert result["ttft_ms"]["mean"] == pytest.approx(1000.0)
    assert result["tpot_ms"]["mean"] == pytest.approx((1000 + 2000) / 2)
    assert result["itl_ms"]["mean"] == pytest.approx((1000 + 1000 + 2000) / 3)
    assert result["e2e_ms"]["max"] == pytest.approx(3000.0)
    assert result["decode_tokens_per_s"] == pytest.approx(1 / 1.5)
    plain = summarise(records, joules=12.5)
    assert plain["joules_per_token"] == pytest.approx(2.5)
    assert "goodput_per_s" not in plain and "joules_per_token" not in result


def test_targets_bind_one_by_one():
    one = record(0.0, [0.2, 0.3], 2)  # ttft 200, tpot 100, e2e 300 ms
    assert Targets().met_by(one) and Targets(200.0, 101.0, 301.0).met_by(one)
    assert not Targets(ttft_ms=199.0).met_by(one)
    assert not Targets(tpot_ms=99.0).met_by(one)
    assert not Targets(e2e_ms=299.0).met_by(one)
    assert Targets(tpot_ms=1.0).met_by(record(0.0, [1.0], 1))  # one token has no time between


def test_all_failed():
    result = summarise([record(0.0, [], 0, error="refused")])
    assert result["failed"] == 1 and "seconds" not in result


def test_median_of_runs():
    runs = [{"a": 1.0, "b": {"c": 5}, "label": "x", "d": None}] * 2
    runs.append({"a": 9.0, "b": {"c": 7}, "label": "y", "d": 4.0})
    assert median_of(runs) == {"a": 1.0, "b": {"c": 5}}
    assert median_of([{"failed": 0}, {"failed": 2}, {"failed": 0}]) == {"failed": 2}
    assert not any(isinstance(v, float) and math.isnan(v) for v in median_of(runs).values())

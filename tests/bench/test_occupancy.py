"""Slots busy, as a server's /metrics tells: the exposition is the server's own."""

import asyncio
from types import SimpleNamespace

import pytest
from test_client import served

from jaxserve.bench import occupancy
from jaxserve.obs.metrics import Metrics
from jaxserve.scheduler.stats import Stats


def step(rows, *, waiting=()):
    return SimpleNamespace(num_rows=rows, num_decode=rows, num_tokens=rows, waiting=waiting)


def told_by(metrics):
    return occupancy.parse(metrics.render()[0].decode())


def test_a_run_between_two_readings():
    metrics = Metrics(lambda: Stats(slots=4), "m")
    metrics.on_step(step(1), 100.0)  # before the run
    before = told_by(metrics)
    metrics.on_step(step(4, waiting=("r1",)), 3.0)
    metrics.on_step(step(2, waiting=("r1",)), 1.0)
    metrics.on_step(step(1), 4.0)
    assert occupancy.between(before, told_by(metrics)) == {
        "occupancy": pytest.approx((4 * 3 + 2 * 1 + 1 * 4) / (4 * 8)),
        "occupancy_queued": pytest.approx((4 * 3 + 2 * 1) / (4 * 4)),
    }


def test_nobody_waited():
    metrics = Metrics(lambda: Stats(slots=2), "m")
    before = told_by(metrics)
    assert occupancy.between(before, told_by(metrics)) == {}  # no steps
    metrics.on_step(step(1), 1.0)
    figures = {"occupancy": 0.5, "occupancy_queued": None}
    assert occupancy.between(before, told_by(metrics)) == figures


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe",
        b"HTTP/1.1 200 OK\r\n\r\nvllm:num_requests_running 1.0\n<html>",
        b"HTTP/1.1 200 OK\r\n\r\njaxserve:slot_seconds_total{waiting= x\n",
        b"SSH-2.0\r\n\r\n",
    ],
)
def test_other_servers_are_measured_without(reply):
    counts, ((head, _),) = served(reply, occupancy.read)
    assert head.startswith("GET /metrics ")  # beside the version's path, not below it
    assert occupancy.between(counts, counts) == {}


def test_a_server_that_is_gone():
    api = occupancy.Api("http://127.0.0.1:9/v1")
    assert asyncio.run(occupancy.read(api)) == {}

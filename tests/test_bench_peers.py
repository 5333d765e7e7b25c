"""The comparison of engines: one that breaks down must not take the others' figures with it."""

import io
import types

from rich.console import Console

from jaxserve.bench import serve
from tools import bench_peers


def test_a_peer_that_ends_is_told_of_and_left_out(monkeypatch):
    monkeypatch.setattr(serve, "unseen", lambda wanted: wanted)
    turns = []

    def dies_in_its_second_turn(wanted):
        turns.append(wanted.name)
        if len(turns) == 2:
            raise RuntimeError("frail ended: out of memory")
        return {"output_tokens_per_s": 10.0}

    ours = bench_peers.Peer(bench_peers.OURS, lambda wanted: {"output_tokens_per_s": 20.0})
    peers = [bench_peers.Peer("frail", dies_in_its_second_turn), ours]
    workloads = [types.SimpleNamespace(name=name) for name in ("w2", "w5")]
    out = io.StringIO()
    console = Console(file=out, width=140)
    runs = bench_peers.measure(peers, workloads, 3, console)
    bench_peers.show(workloads, runs, console)
    assert turns == ["w2", "w5"] and peers == [ours]
    assert len(runs[ours.name, "w2"]) == len(runs[ours.name, "w5"]) == 3
    told = out.getvalue()
    assert told.count("frail is left out from here on: frail ended: out of memory") == 1
    assert "w2, tokens/s: 2.00 times frail's" in told and "no peer" not in told

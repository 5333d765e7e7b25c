"""The simulator against queues that can be worked out by hand, and against itself."""

import gc
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.sim.cost_model import CostModel, features, features_of, padded
from jaxserve.sim.report import Histogram
from jaxserve.sim.simulator import VOCAB_SIZE, Simulation, Targets, run
from jaxserve.sim.workload import (
    Arrival,
    merge,
    owned_by,
    poisson,
    read_trace,
    repeated,
    skewed,
    sped_up,
    workload,
    workload_size,
)
from jaxserve.types import Request, StepResult

SECOND_A_STEP = CostModel((1.0, 0.0, 0.0, 0.0, 0.0, 0.0))


def limits_of(**changes):
    settings = dict(
        num_slots=4,
        num_pages=2000,
        page_size=16,
        token_budget=64,
        max_model_len=4096,
        vocab_size=VOCAB_SIZE,
        prefix_caching=False,
        max_queued=100_000,
    )
    return Limits(**{**settings, **changes})


def serve(arrivals, limits=None, cost=SECOND_A_STEP, pipelined=False, **config):
    scheduler = Scheduler(limits or limits_of(), SchedulerConfig(**config))
    return Simulation(scheduler, cost.seconds, pipelined=pipelined).run(arrivals)


def test_one_request_by_hand():
    """100 tokens in chunks of 64 and 36, then four more tokens: six steps of a second."""
    report = serve([Arrival(10.0, 100, 5)])
    everyone = report.group("all")
    assert report.steps == 6 and report.seconds == pytest.approx(6.0)
    assert everyone.ttft.quantile(0.5) == pytest.approx(2.0, rel=0.01)
    assert everyone.e2e.quantile(0.5) == pytest.approx(6.0, rel=0.01)
    assert everyone.itl.mean == pytest.approx(1.0) and len(everyone.itl) == 4
    assert report.busy_seconds == pytest.approx(6.0)


def test_on_paper_decides_the_same():
    """Plans without tokens and page tables are no other plans, and bring the same ends."""
    limits, seconds = limits_of(num_pages=24), CostModel((0.01, 1e-3, 0.0, 0.0, 0.0, 0.0)).seconds
    reports = []
    for on_paper in (False, True):
        simulation = Simulation(Scheduler(limits, on_paper=on_paper), seconds)
        reports.append(simulation.run(poisson(2.0, 200, prompt=60, output=30, tenants=2)))
    assert reports[0].summary() == reports[1].summary()
    assert reports[0].preemptions > 0 and len(reports[0].group("all").e2e) > 150


def test_pages_that_travel_save_computing_and_cost_time():
    """KV kept on the host is not computed again; each page takes its price, out and in."""
    reports = {}
    for name, host_pages, page_s in (("none", 0, 0.0), ("free", 60, 0.0), ("dear", 60, 0.5)):
        limits = limits_of(num_pages=24, host_pages=host_pages)
        cost = CostModel((0.01, 1e-3, 0.0, 0.0, 0.0, page_s))
        load = poisson(2.0, 100, prompt=60, output=30)
        simulation = Simulation(Scheduler(limits, on_paper=True), cost.seconds, pipelined=False)
        reports[name] = simulation.run(load)
        kept = simulation.scheduler.stats().host_pages_kept
        assert (kept > 0) == (name != "none")
    assert reports["none"].preemptions > 0
    assert reports["free"].computed_tokens < reports["none"].computed_tokens
    assert reports["dear"].seconds > reports["free"].seconds + 1


def test_seconds_are_features_times_prices():
    """Two rows decode; of three chunks one is a single token, which counts as decoding does."""
    scheduler = Scheduler(limits_of(num_slots=5))
    for length in (3, 4, 30, 20, 50):
        scheduler.add(Request(f"r{length}", (0,) * length))
    plan = scheduler.plan(0.0)
    scheduler.absorb(plan, StepResult(np.zeros(plan.num_rows, np.int32)), 0.0)
    plan = scheduler.plan(1.0)
    assert plan.num_decode and plan.num_rows > plan.num_decode
    model = CostModel((3.0, 5.0, 7.0, 11.0, 13.0, 17.0), sizes=(8, 32, 96), factors=(1.0,) * 3)
    expected = features_of(plan, model.sizes) @ np.array(model.price)
    assert model.seconds(plan) == pytest.approx(expected)


def test_pipelining_hides_the_host_but_keeps_order():
    """The next step is planned 0.9 s into one of a second, so an arrival after that is seen one
    step later; and so is any while steps of that size are not known yet."""
    for time, plain_s, overlapped_s in ((4.5, 1.5, 1.5), (4.95, 1.05, 2.05), (1.5, 1.5, 2.5)):
        arrivals = [Arrival(0.0, 10, 8), Arrival(time, 10, 5)]
        plain, overlapped = serve(arrivals), serve(arrivals, pipelined=True)
        assert plain.group("all").ttft.quantile(0.9) == pytest.approx(plain_s, rel=0.02)
        assert overlapped.group("all").ttft.quantile(0.9) == pytest.approx(overlapped_s, rel=0.02)
        assert plain.group("all").output_tokens == overlapped.group("all").output_tokens == 13


def test_a_full_batch_makes_the_next_wait():
    report = serve([Arrival(0.0, 4, 3)] * 8)
    assert report.group("all").ttft.quantile(0.2) == pytest.approx(1.0, rel=0.01)
    assert report.group("all").ttft.quantile(0.9) == pytest.approx(4.0, rel=0.01)
    assert report.summary()["slot_occupancy"] == pytest.approx(1.0, abs=0.2)


def test_a_lost_place_is_a_gap():
    """The first one has three tokens when another takes its slot for two seconds. Its fourth comes
    a second after that, with what it had computed again: gaps of 1, 1, 3 and 1 s, and of 1 s."""
    arrivals = [Arrival(0.0, 4, 5, priority=1), Arrival(2.5, 4, 2, priority=0)]
    report = serve(arrivals, limits_of(num_slots=1), policy="priority")
    gaps = report.group("all").itl
    assert report.preemptions == 1 and report.seconds == pytest.approx(7.0)
    assert len(gaps) == 5 and gaps.total == pytest.approx(7.0)
    assert gaps.quantile(1.0) == pytest.approx(3.0, rel=0.01)
    assert report.group("all").ttft.quantile(0.5) == pytest.approx(1.0, rel=0.01)


def test_idle_time_passes_at_once():
    report = serve([Arrival(0.0, 4, 2), Arrival(1000.0, 4, 2)])
    assert report.steps == 4 and report.seconds == pytest.approx(1002.0)
    assert report.summary()["utilisation"] == pytest.approx(4 / 1002)


def test_same_inputs_same_report():
    arrivals = list(poisson(2.0, 60, prompt=60, output=8, seed=3))
    first, second = (serve(arrivals, pipelined=True).summary() for _ in range(2))
    assert json.dumps(first) == json.dumps(second)


def test_policies_differ_where_they_should():
    """vtc keeps the light tenant's wait short under a flood; fcfs does not."""
    light = {}
    for policy in ("fcfs", "vtc"):
        few = poisson(0.1, 8, prompt=20, output=4, seed=1)
        many = poisson(4.0, 200, prompt=40, output=6, seed=2)
        both = merge(owned_by("light", few), owned_by("heavy", many))
        report = serve(both, policy=policy)
        light[policy] = report.group("light").ttft.quantile(0.5)
        assert len(report.group("light").e2e) == 8
    assert light["vtc"] < light["fcfs"] / 3


def test_static_batching_is_slower_on_skewed_work():
    arrivals = list(skewed())
    seconds = {
        batching: serve(arrivals, limits_of(num_slots=16, batching=batching)).seconds
        for batching in ("static", "continuous")
    }
    assert seconds["static"] > 1.5 * seconds["continuous"]


def test_shared_blocks_hit_the_prefix_cache():
    arrivals = [Arrival(float(i), 1500, 2, blocks=(1, 2, 10 + i)) for i in range(0, 400, 100)]
    report = serve(arrivals, limits_of(prefix_caching=True))
    assert report.hit_tokens == 3 * 1024 and report.query_tokens == 4 * 1500


def test_a_trace_that_tells_of_shared_blocks_is_served_with_them(tmp_path):
    """Mooncake's ids of blocks of 512 tokens: the second prompt begins as the first, the last page
    of which is not looked for: one token must be left to compute."""
    record = {"input_tokens": 1024, "output_tokens": 2, "hash_ids": [7, 8]}
    lines = [json.dumps({"arrival_s": at} | record) for at in (0.0, 100.0)]
    (tmp_path / "mooncake_conversation.jsonl").write_text("\n".join(lines))
    quiet = lambda line: None
    (report,) = run(workload_name="mooncake_conversation", traces=str(tmp_path), out=quiet)
    assert report.hit_tokens == 1008 and report.query_tokens == 2048


def test_goodput_counts_requests_within_their_targets():
    scheduler = Scheduler(limits_of(num_slots=1))
    simulation = Simulation(
        scheduler, SECOND_A_STEP.seconds, pipelined=False, targets=Targets(ttft_s=3.5, itl_s=2.0)
    )
    report = simulation.run([Arrival(0.0, 4, 3)] * 4)  # first tokens after 1, 4, 7, 10 s
    assert report.group("all").summary()["goodput"] == 0.25


def test_refused_requests_are_counted_not_served():
    report = serve([Arrival(0.0, 5000, 3), Arrival(0.0, 5, 3)])
    assert report.refusals == 1 and len(report.group("all").e2e) == 1


@settings(deadline=None)
@given(st.lists(st.floats(2e-4, 1e4), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_histogram_quantiles_are_right_to_a_bucket(values, share):
    histogram = Histogram()
    histogram.add(np.array(values[: len(values) // 2]))
    for value in values[len(values) // 2 :]:
        histogram.add_one(value)
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    assert histogram.quantile(share) == pytest.approx(exact, rel=0.013)
    assert len(histogram) == len(values)
    assert histogram.mean == pytest.approx(np.mean(values))


def test_features_of_a_mixed_step():
    """Two decoding rows at 10 and 20 tokens, a chunk of 5 after 3: pairs count the chunk alone."""
    parts = features(np.array([9, 19, 3]), np.array([1, 1, 5]))
    assert parts.tolist() == [1, 7, 3, 10 + 20 + 8, 5 * 8, 0]


def test_steps_are_padded_to_the_next_size():
    assert [padded(count, (1, 4, 16)) for count in (1, 2, 4, 5, 16, 17)] == [1, 4, 4, 16, 16, 17]
    parts = features(np.array([0, 9]), np.array([3, 1]), num_copied=2, sizes=(1, 16))
    assert parts.tolist() == [1, 16, 2, 3 + 10, 3 * 3, 2]


def test_each_size_has_its_factor():
    """5, 20 and 50 ms for 1, 16 and 64 tokens lie on no line; with factors they are met."""
    sizes, seconds_of = (1, 16, 64), {1: 0.005, 16: 0.020, 64: 0.050}
    counts = [1, 16, 64] * 20
    parts = np.array([features(np.array([0]), np.array([c]), 0, sizes) for c in counts])
    model = CostModel.fit(parts, np.array([seconds_of[c] for c in counts]), sizes=sizes)
    for place, size in enumerate(sizes):
        told = parts[place] @ np.array(model.price) * model.factors[place]
        assert told == pytest.approx(seconds_of[size])
    assert model.error < 1e-9 and len(set(model.factors)) == 3


def test_what_the_steps_do_not_show_has_no_price():
    """Rough times of short prompts: noise must not become the price of long ones."""
    draw = np.random.default_rng(0)
    counts = [draw.integers(1, 9, rows) for rows in draw.integers(1, 5, 400)]
    parts = np.array([features(np.zeros_like(count_S), count_S) for count_S in counts])
    seconds = (0.01 + 1e-3 * parts[:, 1]) * draw.lognormal(0, 0.3, len(parts))
    assert CostModel.fit(parts, seconds).price[3:] == (0, 0, 0)
    seconds = 0.01 + 1e-3 * parts[:, 1] + 1e-4 * parts[:, 4]
    assert CostModel.fit(parts, seconds).price[4] == pytest.approx(1e-4, rel=0.01)


def test_fit_ignores_pauses_and_never_goes_below_zero():
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 200, 300)
    parts = np.array([features(np.array([5]), np.array([count])) for count in counts])
    seconds = 0.01 + 1e-4 * counts
    seconds[::37] *= 50  # the machine paused
    model = CostModel.fit(parts, seconds)
    assert min(model.price) >= 0
    predicted = parts @ np.array(model.price)
    np.testing.assert_allclose(predicted, 0.01 + 1e-4 * counts, rtol=0.02)


def test_generators_keep_their_rate_and_order():
    arrivals = list(poisson(5.0, 20_000, prompt=100, output=20, spread=0.5, tenants=3))
    times = np.array([a.time for a in arrivals])
    assert (np.diff(times) >= 0).all() and len(arrivals) == 20_000
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.03)
    assert np.median([a.prompt for a in arrivals]) == pytest.approx(100, rel=0.03)
    assert {a.tenant for a in arrivals} == {"t0", "t1", "t2"}
    fast = list(sped_up(iter(arrivals[:10]), 2.0))
    assert fast[9].time == pytest.approx(arrivals[9].time / 2)
    both = list(merge(owned_by("x", iter(arrivals[:50])), owned_by("y", iter(fast))))
    assert len(both) == 60 and [a.time for a in both] == sorted(a.time for a in both)
    twice = list(repeated(lambda: iter(arrivals[:3]), 2, 1000.0))
    assert twice[3].time == pytest.approx(arrivals[0].time + 1000.0)


def test_skewed_workload_is_as_described():
    arrivals = list(skewed())
    prompts, outputs = [a.prompt for a in arrivals], [a.output for a in arrivals]
    assert len(arrivals) == 64 and {a.time for a in arrivals} == {0.0}
    assert min(prompts) >= 16 and max(prompts) <= 512
    assert min(outputs) >= 8 and max(outputs) <= 256 and np.median(outputs) < 40


def test_reads_traces(tmp_path):
    (tmp_path / "azure_llm_2023_conv.csv").write_text(
        "arrival_s,input_tokens,output_tokens\n0.0,374,44\n4.5,396,0\n"
    )
    (tmp_path / "mooncake_synthetic.jsonl").write_text(
        '{"arrival_s":1.5,"input_tokens":700,"output_tokens":5,"hash_ids":[3,9]}\n'
    )
    azure = list(workload("azure_conv", traces=tmp_path, rate=1, count=1))
    assert azure == [Arrival(0.0, 374, 44), Arrival(4.5, 396, 1)]
    assert workload_size("azure_conv", traces=tmp_path, count=7) == 3  # the header is one too many
    assert workload_size("poisson", traces=tmp_path, count=7) == 7
    (mooncake,) = read_trace("mooncake_synthetic", tmp_path)
    ids = mooncake.prompt_ids(VOCAB_SIZE)
    assert ids == (3,) * 512 + (9,) * 188
    with pytest.raises(ValueError, match="say where with --traces"):
        list(read_trace("burstgpt", tmp_path))
    with pytest.raises(ValueError, match="say where with --traces"):
        workload_size("burstgpt", traces=tmp_path, count=1)
    with pytest.raises(ValueError, match="choose one of azure_conv"):
        workload("nothing", traces=tmp_path, rate=1, count=1)


def test_the_shared_traces(shared):
    """Means as their README gives them."""
    azure = list(read_trace("azure_conv", shared / "traces"))
    assert len(azure) == 19_366
    assert np.mean([a.prompt for a in azure]) == pytest.approx(1155, abs=1)
    assert np.mean([a.output for a in azure]) == pytest.approx(211, abs=1)
    sessions = {a.tenant for a in read_trace("burstgpt", shared / "traces")}
    assert len(sessions) == 53 + ("" in sessions)


def test_the_verb_prints_a_table_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    lines, told = [], []
    reports = run(
        workload_name="two_tenants",
        policies=["fcfs", "vtc"],
        rate=2.0,
        count=22,
        plot=str(tmp_path / "plot.png"),
        out=lines.append,
        progress=lambda *news: told.append(news),
    )
    assert told[0] == ("fcfs", 0, 22) and told[-1] == ("vtc", 22, 22)
    assert [done for policy, done, _ in told if policy == "fcfs"] == list(range(23))
    assert [report.policy for report in reports] == ["fcfs", "vtc"]
    with pytest.raises(ValueError, match="--policy=luck: choose one of fcfs"):
        run(workload_name="skewed", policies=["fcfs", "luck"], out=lines.append)
    text = "\n".join(lines)
    assert "ttft p50" in text and "heavy" in text and "light" in text
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_memory_does_not_grow_with_requests():
    """After 1,000 requests of all lengths as many bytes and objects are alive as after 100, with
    everything still held."""
    alive, held = {}, {}
    tracemalloc.start()
    for count in (100, 100, 1000):  # the first run fills caches
        scheduler = Scheduler(limits_of(token_budget=4096), on_paper=True)
        simulation = Simulation(scheduler, SECOND_A_STEP.seconds)
        simulation.run(poisson(0.02, count, prompt=500, output=2))
        gc.collect()
        alive[count], held[count] = len(gc.get_objects()), tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert alive[1000] <= alive[100] + 100 and held[1000] <= held[100] + 50_000
    assert len(simulation.report.group("all").e2e) > 950  # the longest prompts are refused

"""CaraServe's tables: what they report of runs, on some seconds of traffic."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.sim import caraserve
from bench.sim.caraserve import (
    MODEL,
    RANKS,
    Bench,
    ClusterPoint,
    Point,
    Server,
    Site,
    Traffic,
    assistant_for,
    overheads,
    profiled,
    serve,
    serve_many,
    servers,
    settings_of,
)
from bench.sim.core.calibration import A10_ON_DEMAND
from bench.sim.core.clock import Clock
from bench.sim.core.cluster import Cluster, facts_of
from bench.sim.core.hardware import EPYC_7R32
from bench.sim.core.node import Node
from bench.sim.core.requests import Arrival
from bench.sim.core.shapes import BLOCK_TOKENS
from bench.sim.core.tables import Workers
from engine_bridge.driver.gemm import MIN_ROWS
from engine_bridge.policy.routing import (
    POLICIES,
    Ask,
    LoadBalance,
    NodeFacts,
    Overture,
    RankAware,
    Ranks,
    Route,
)

TRAFFIC = Traffic(9.0, 64)
SMALL = Site(num_nodes=4, num_adapters=200, per_s=24.0, span_s=8.0, warm_up_s=2.0)


def means(arm: str, traffic: Traffic = TRAFFIC, span_s: float = 20.0) -> caraserve.Means:
    return serve(Point(servers(traffic.rank)[arm], traffic, span_s, 1))


# -- one node ----------------------------------------------------------------------------------------------------------


def test_loads_hold_up_everybody_and_a_host_helps() -> None:
    cached, on_demand, helped, helped_16 = map(means, ("cached", "on_demand", "cpu_assist", "cpu_assist_16"))
    assert on_demand.ttft_s > 1.5 * cached.ttft_s and on_demand.tpot_s > 1.3 * cached.tpot_s
    assert helped.ttft_s < 1.1 * cached.ttft_s
    assert helped.ttft_s < helped_16.ttft_s < on_demand.ttft_s
    assert (cached.cold_share, on_demand.cold_share, helped.cold_share) == (0.0, 1.0, 1.0)
    assert on_demand.stalled_share > 0.1
    assert helped.stalled_share == cached.stalled_share == 0.0


def test_smaller_ranks_and_fewer_requests_suffer_less() -> None:
    def added(traffic: Traffic) -> float:
        return means("on_demand", traffic).tpot_s / means("cached", traffic).tpot_s

    assert added(Traffic(9.0, 32)) < added(TRAFFIC)
    assert added(Traffic(6.0, 64)) < added(TRAFFIC)


def test_popular_adapters_are_found_where_others_use_them() -> None:
    few, many = (means("on_demand", Traffic(6.0, 64, num)) for num in (4, 400))
    assert few.cold_share < many.cold_share < 1.0


def test_cores_by_the_live_rule_are_as_quick_as_the_device() -> None:
    for rank in (32, 64):
        assistant = assistant_for(rank)
        flops = 2 * MODEL.lora_weights_per_rank * rank * assistant.tokens_per_core
        cost = Server(assistant=assistant).cost
        base_s = cost.prefill_s(caraserve.usual_prompt()) - cost.gpu.step_s
        is_quick = flops / assistant.achieved_core_flops <= base_s * MODEL.adapted_share
        assert is_quick or assistant.tokens_per_core == MIN_ROWS
    assert assistant_for(32).tokens_per_core > assistant_for(64).tokens_per_core
    assert assistant_for(64).tokens_per_core < EPYC_7R32.tokens_per_core


# -- many nodes --------------------------------------------------------------------------------------------------------


def test_a_node_reports_what_runs_and_what_waits() -> None:
    clock = Clock()
    node = Server(has_all=True, gpu=A10_ON_DEMAND).node(clock, RANKS)
    empty = facts_of("n", node)
    assert (empty.running, empty.queued, empty.num_tokens) == (Ranks(), Ranks(), 0)
    node.submit(Arrival("first", 0.0, 100, 50, 3))
    node.submit(Arrival("second", 0.0, 30, 50, 0))
    facts = facts_of("n", node)
    # The first one's prompt is being computed; the second one came after that step had begun.
    assert (facts.running, facts.queued, facts.queued_tokens) == (Ranks(1, 64, 64), Ranks(1, 8, 8), 30)
    reserved = round(caraserve.usual_answer())
    blocks = (100 + reserved) // BLOCK_TOKENS + 1 + (30 + reserved) // BLOCK_TOKENS + 1
    assert facts.num_tokens == blocks * BLOCK_TOKENS
    assert facts.free_tokens == empty.free_tokens - facts.num_tokens
    clock.run()
    assert facts_of("n", node) == empty


class Recorder:
    """Fewest requests; keeps what it was told."""

    name = "recorder"

    def __init__(self) -> None:
        self.told: list[tuple[Ask, list[NodeFacts]]] = []

    def route(self, ask: Ask, nodes: Sequence[NodeFacts]) -> Route:
        self.told.append((ask, list(nodes)))
        return LoadBalance().route(ask, nodes)


def cluster_of(server: Server, usual_load_s: dict[int, float]) -> tuple[Clock, list[Node], Recorder, Cluster]:
    clock, recorder = Clock(), Recorder()
    nodes = [server.node(clock, RANKS) for _ in range(3)]
    return clock, nodes, recorder, Cluster(clock, nodes, recorder, RANKS, 58, usual_load_s)


def test_a_router_is_told_how_the_nodes_stand_now() -> None:
    clock, nodes, recorder, cluster = cluster_of(Server(has_all=True, gpu=A10_ON_DEMAND), {})
    for at in range(7):
        cluster.submit(Arrival(str(at), 0.0, 20, 5, at % 4))
    assert [sum(facts.num_requests for facts in told) for _, told in recorder.told] == list(range(7))
    assert cluster.num_by_node == Counter({"0": 3, "1": 2, "2": 2})
    clock.run()
    assert [facts.num_requests for facts in cluster.facts()] == [0, 0, 0]
    assert all(ask.num_answer_tokens == 58 and not ask.usual_load_s for ask, _ in recorder.told)
    assert sum(len(node.ended) for node in nodes) == 7


def test_a_router_is_told_where_adapters_are() -> None:
    clock, _, recorder, cluster = cluster_of(Server(gpu=A10_ON_DEMAND), {rank: 0.5 for rank in RANKS})
    cluster.submit(Arrival("a", 0.0, 20, 50, 2))
    clock.run(until_s=0.5)
    cluster.submit(Arrival("b", 0.5, 20, 50, 2))
    first, second = (ask for ask, _ in recorder.told)
    assert (first.rank, first.usual_load_s, first.adapter_load_s) == (32, 0.5, {})
    assert second.adapter_load_s == {"0": 0.0}


def test_every_policy_serves_all_and_ours_and_the_papers_are_quicker_than_first_fit() -> None:
    found = {name: serve_many(ClusterPoint(name, SMALL, 1)) for name in POLICIES if name != "priority"}
    assert found["rank_aware"].tpot_s < found["random"].tpot_s < found["first_fit"].tpot_s
    assert found["overture"].tpot_s < found["random"].tpot_s
    assert found["first_fit"].most_load > found["load_balance"].most_load >= 1.0
    assert found["first_fit"].attainment < found["rank_aware"].attainment
    assert serve_many(ClusterPoint("random", SMALL, 1)) == found["random"], "the same seed, the same run"
    assert serve_many(ClusterPoint("random", SMALL, 2)) != found["random"]


def test_where_adapters_are_loaded_ours_finds_more_of_them() -> None:
    site = replace(SMALL, server=Server(gpu=A10_ON_DEMAND), num_nodes=12, per_s=60.0, num_adapters=2000)
    ours, theirs = (serve_many(ClusterPoint(name, site, 1)) for name in ("overture", "rank_aware"))
    assert 0 < ours.cold_share < theirs.cold_share
    assert ours.ttft_s < theirs.ttft_s


def test_models_fit_as_well_as_the_papers_and_tell_the_kernels_apart() -> None:
    for kernel in caraserve.KERNEL_NAMES:
        decode, _, with_tokens = profiled(kernel)
        assert decode.r2 > 0.96 and with_tokens.r2 > 0.999
        cost = Server(kernel=kernel).cost
        batch = Ranks(20, 20 * 8 + 56, 64)
        exact = cost.step_s((), 20, 20 * 60, cost.kernel({8: 19, 64: 1}))
        assert with_tokens.model.seconds(batch, 20 * 60) == pytest.approx(exact, rel=0.01)


def test_the_slo_is_one_and_a_half_times_the_pace_of_a_merged_model() -> None:
    settings = settings_of("rank_aware", SMALL)
    assert settings.slo_s / 1.5 == pytest.approx(0.0311, rel=0.01)
    assert settings_of("overture", SMALL).decode.token_s > 0 == settings.decode.token_s
    assert settings.loads_block
    assert not settings_of("overture", replace(SMALL, server=Server(assistant=EPYC_7R32))).loads_block


# -- reports -----------------------------------------------------------------------------------------------------------


def test_figures_say_what_made_them_and_what_falls_short() -> None:
    bench = Bench(Workers(1), (1, 2), span_s=10.0)
    figures, result = overheads(
        bench, {TRAFFIC: ((4.12, 0.71, 0.5), (-0.9, 0.11, 0.09))}, ("on_demand", "cpu_assist")
    )
    by_name = {figure.what: figure for figure in figures}
    slow, quick = (by_name[f"TTFT, {arm}, {TRAFFIC.name}"] for arm in ("on_demand", "cpu_assist"))
    assert slow.falls_short, "a baseline whose loads cost less than the paper's"
    assert quick.falls_short and len(quick.values) == 2
    assert "Fcfs" in quick.made_by and "EPYC" in quick.made_by and "Alpaca" in quick.made_by
    assert result[TRAFFIC.name]["on_demand"]["ttft_change"] == round(slow.median, 4)
    made_by = ClusterPoint("overture", SMALL, 1).made_by
    assert made_by.startswith(Overture.__name__) and "A10" in made_by and "functions(200)" in made_by
    assert ClusterPoint("rank_aware", SMALL, 1).made_by.startswith(RankAware.__name__)


def test_the_command_ends_with_a_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(caraserve, "Site", lambda **parts: replace(SMALL, **parts))
    bench = Bench(Workers(1), (1,), span_s=3.0, cluster_span_s=4.0)
    caraserve.show(("cold", "production", "router"), bench)
    printed = capsys.readouterr().out.strip().splitlines()
    result = json.loads(printed[-1])
    assert (
        set(result["ttft_overhead"]) == {"on_demand", "cpu_assist"} == set(result["production_ttft_overhead"])
    )
    assert set(result["slo_attainment"]) == {"bgmv", "mbgmv"} == set(result["tpt_change"])
    for change in result["tpt_change"].values():
        assert set(change) == {"most_idle", "first_fit", "random"}
    figure = result["parts"]["router"]["figures"][0]
    assert set(figure) >= {"what", "median", "spread", "seeds", "paper", "made_by", "falls_short"}
    short = ["FALLS SHORT" in line for line in printed[2:] if "paper" in line]
    first = short[: short.index(False)]
    assert any(first) and len(first) < sum(short), "those of the first part stand at its top"

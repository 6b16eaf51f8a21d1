"""CaraServe's router: what its nodes report, what it reports of runs, on some seconds of traffic."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.sim import caraserve
from bench.sim.caraserve import RANKS, Bench, Point, Site, cost_of, profiled, serve, settings_of
from bench.sim.core.clock import Clock
from bench.sim.core.cluster import Cluster, facts_of
from bench.sim.core.requests import Arrival
from bench.sim.core.shapes import BLOCK_TOKENS, VLLM
from bench.sim.core.tables import Workers
from engine_bridge.policy.nodes.routing import (
    POLICIES,
    LoadBalance,
    Overture,
    RankAware,
    RequestEstimate,
    Route,
)
from engine_bridge.protocol.node_facts import NodeFacts, Ranks

SMALL = Site(num_nodes=4, num_adapters=200, per_s=24.0, span_s=8.0, warm_up_s=2.0)


# -- nodes -------------------------------------------------------------------------------------------------------------


def test_a_node_reports_what_runs_and_what_waits() -> None:
    clock = Clock()
    node = SMALL.node(clock, RANKS)
    empty = facts_of("n", node)
    assert (empty.running, empty.queued, empty.num_tokens) == (Ranks(), Ranks(), 0)
    node.submit(Arrival("first", 0.0, 100, 50, 3))
    node.submit(Arrival("second", 0.0, 30, 50, 0))
    facts = facts_of("n", node)
    # The first one's prompt is being computed; the second one came after that step had begun.
    assert (facts.running, facts.queued, facts.queued_tokens) == (Ranks(1, 64, 64), Ranks(1, 8, 8), 30)
    blocks = 100 // BLOCK_TOKENS + 1 + 30 // BLOCK_TOKENS + 1
    assert facts.num_tokens == blocks * BLOCK_TOKENS
    assert facts.free_tokens == empty.free_tokens - facts.num_tokens
    clock.run()
    assert facts_of("n", node) == empty


class Recorder:
    """Fewest requests; keeps what it was told."""

    name = "recorder"

    def __init__(self) -> None:
        self.told: list[tuple[RequestEstimate, list[NodeFacts]]] = []

    def route(self, ask: RequestEstimate, nodes: Sequence[NodeFacts]) -> Route:
        self.told.append((ask, list(nodes)))
        return LoadBalance().route(ask, nodes)


def test_a_router_is_told_how_the_nodes_stand_now() -> None:
    clock, recorder = Clock(), Recorder()
    nodes = [SMALL.node(clock, RANKS) for _ in range(3)]
    cluster = Cluster(clock, nodes, recorder, RANKS, 58)
    for at in range(7):
        cluster.submit(Arrival(str(at), 0.0, 20, 5, at % 4))
    assert [sum(facts.num_requests for facts in told) for _, told in recorder.told] == list(range(7))
    assert cluster.num_by_node == Counter({"0": 3, "1": 2, "2": 2})
    clock.run()
    assert [facts.num_requests for facts in cluster.facts()] == [0, 0, 0]
    assert all(ask.num_answer_tokens == 58 for ask, _ in recorder.told)
    assert {ask.rank for ask, _ in recorder.told} == set(RANKS)
    assert sum(len(node.ended) for node in nodes) == 7


def test_every_policy_serves_all_and_ours_and_the_papers_are_quicker_than_first_fit() -> None:
    found = {name: serve(Point(name, SMALL, 1)) for name in POLICIES if name != "priority"}
    assert found["rank_aware"].tpot_s < found["random"].tpot_s < found["first_fit"].tpot_s
    assert found["overture"].tpot_s < found["random"].tpot_s
    assert found["first_fit"].most_load > found["load_balance"].most_load >= 1.0
    assert found["first_fit"].attainment < found["rank_aware"].attainment
    assert serve(Point(caraserve.FREE_ADAPTERS, SMALL, 1)).tpot_s < min(
        each.tpot_s for each in found.values()
    )
    assert serve(Point("random", SMALL, 1)) == found["random"], "the same seed, the same run"
    assert serve(Point("random", SMALL, 2)) != found["random"]


def test_models_fit_as_well_as_the_papers_and_tell_the_kernels_apart() -> None:
    for kernel in caraserve.KERNEL_NAMES:
        decode, _, with_tokens = profiled(kernel)
        assert decode.r2 > 0.96 and with_tokens.r2 > 0.999
        cost = cost_of(kernel)
        batch = Ranks(20, 20 * 8 + 56, 64)
        exact = cost.step_s((), 20, 20 * 60, cost.kernel({8: 19, 64: 1}))
        assert with_tokens.model.seconds(batch, 20 * 60) == pytest.approx(exact, rel=0.01)


def test_the_slo_is_one_and_a_half_times_the_pace_of_a_merged_model() -> None:
    settings = settings_of("rank_aware", SMALL)
    assert settings.slo_s / 1.5 == pytest.approx(0.0311, rel=0.01)
    assert settings_of("overture", SMALL).decode.token_s > 0 == settings.decode.token_s


def test_prompts_beside_those_that_decode_take_no_step_of_their_own() -> None:
    assert settings_of("overture", SMALL).prefill_step_s > 0
    assert settings_of("overture", replace(SMALL, shape=VLLM)).prefill_step_s == 0


def test_routing_by_ranks_wins_where_prompts_hold_up_those_that_decode() -> None:
    def won(site: Site) -> float:
        ours, theirs = (serve(Point(name, site, 1)) for name in ("rank_aware", "first_fit"))
        return 1 - ours.tpot_s / theirs.tpot_s

    assert won(SMALL) > won(replace(SMALL, shape=VLLM)) > 0


# -- reports -----------------------------------------------------------------------------------------------------------


def test_figures_say_what_made_them() -> None:
    made_by = Point("overture", SMALL, 1).made_by
    assert made_by.startswith(Overture.__name__) and "A10" in made_by and "functions(200)" in made_by
    assert "Fcfs" in made_by and "Alpaca" in made_by and "whole prompts" in made_by
    assert Point("rank_aware", SMALL, 1).made_by.startswith(RankAware.__name__)


def test_the_command_ends_with_a_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        caraserve,
        "Site",
        lambda kernel, shape=SMALL.shape, **parts: replace(SMALL, kernel=kernel, shape=shape, **parts),
    )
    caraserve.show(("router", "mixed"), Bench(Workers(1), (1,), span_s=4.0))
    printed = capsys.readouterr().out.strip().splitlines()
    result = json.loads(printed[-1])
    assert set(result["slo_attainment"]) == {"bgmv", "mbgmv"} == set(result["tpt_change"])
    for change in (*result["tpt_change"].values(), result["parts"]["mixed"]["tpt_change"]):
        assert set(change) == {"most_idle", "first_fit", "random"}
    figure = result["parts"]["router"]["figures"][0]
    assert set(figure) >= {"what", "median", "spread", "seeds", "paper", "made_by", "falls_short"}
    short = ["FALLS SHORT" in line for line in printed[2:] if "paper" in line]
    first = short[: short.index(False)]
    assert any(first) and len(first) == sum(short), "they stand at the top of their part"

"""CaraServe's router: the small node is the emulated node in all that a router sees, and routers differ as their table says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from bench.emulated import routing
from bench.emulated.core.adapters import AdapterMemory
from bench.emulated.core.arrivals import Arrival
from bench.emulated.core.clock import Clock
from bench.emulated.core.node import Engine
from bench.emulated.core.plays import play_on_node
from bench.emulated.core.steps import VLLM, pool_blocks
from bench.emulated.core.traffic import functions, play, poisson, weighted
from bench.emulated.routing import RANKS, Site, cost_of, lengths, profiled
from bench.emulated.small_node import Served, SmallCluster, SmallNode
from bench.measures import quantile
from engine_bridge.policy.nodes.routing import LOAD_BALANCE, RequestEstimate, Route
from engine_bridge.protocol.node_facts import NodeFacts, Ranks

# -- nodes -------------------------------------------------------------------------------------------------------------


def small(arrivals: Sequence[Arrival], ranks: Sequence[int], kernel: str = "mbgmv") -> list[Served]:
    clock = Clock()
    node = SmallNode(clock, cost_of(kernel), VLLM, ranks)  # type: ignore[arg-type]
    play(clock, arrivals, node.submit)
    return sorted(node.ended, key=lambda each: each.arrival.request_id)


@pytest.mark.parametrize(("kernel", "per_s"), [("mbgmv", 6.0), ("bgmv", 6.0), ("mbgmv", 14.0)])
def test_the_small_node_gives_requests_the_times_of_the_emulated_node(kernel: str, per_s: float) -> None:
    """6 requests a second are what each of the 60 nodes gets; with 14 each step has others' prompts beside those that decode."""
    ranks = RANKS * 10
    arrivals = poisson(lengths(), weighted(functions(len(ranks), random.Random(1))), per_s, 12.0, 3)
    cost = cost_of(kernel)  # type: ignore[arg-type]
    engine = Engine(pool_blocks(cost), has_prefix_cache=False)
    own = play_on_node("fcfs", arrivals, cost, engine, ranks=ranks, memory=AdapterMemory(0, policy=None)).jobs
    found = small(arrivals, ranks, kernel)
    assert len(found) == len(own) > 50
    for name in ("ttft_s", "e2e_s"):
        for share in (0.5, 0.99):
            ours, theirs = (quantile([getattr(each, name) for each in jobs], share) for jobs in (found, own))
            assert ours == pytest.approx(theirs, rel=0.01), (name, share)


def test_a_request_waits_for_the_room_of_its_whole_answer_and_one_that_never_fits_is_refused() -> None:
    clock = Clock()
    node = SmallNode(clock, cost_of("mbgmv"), VLLM)
    most = node.num_tokens
    for at in range(2):  # two prompts fit, but not with their answers
        node.submit(Arrival(str(at), 0.0, most // 3, most // 4))
    assert node.facts("n").queued.num == 1, "the second one came while the first step was under way"
    clock.run()
    first, second = node.ended
    assert second.first_token_s > first.ended_s
    with pytest.raises(ValueError, match="do not fit"):
        node.submit(Arrival("too long", 0.0, most, 1))


def test_a_node_reports_what_runs_and_what_waits() -> None:
    clock = Clock()
    node = Site().node(clock, RANKS)
    empty = node.facts("n")
    assert (empty.running, empty.queued, empty.num_tokens) == (Ranks(), Ranks(), 0)
    node.submit(Arrival("first", 0.0, 100, 50, 3))
    node.submit(Arrival("second", 0.0, 30, 50, 0))
    facts = node.facts("n")
    # The first one's prompt is being computed; the second one came after that step had begun.
    assert (facts.running, facts.queued, facts.queued_tokens) == (Ranks(1, 64, 64), Ranks(1, 8, 8), 30)
    assert facts.free_tokens == empty.free_tokens - 150 - 30
    clock.run()
    assert node.facts("n") == empty


class Recorder:
    """Fewest requests; keeps what it was told."""

    name = "recorder"

    def __init__(self) -> None:
        self.told: list[tuple[RequestEstimate, list[NodeFacts]]] = []

    def route(self, ask: RequestEstimate, nodes: Sequence[NodeFacts]) -> Route:
        self.told.append((ask, list(nodes)))
        return LOAD_BALANCE.route(ask, nodes)


def test_a_router_is_told_how_the_nodes_stand_now() -> None:
    clock, recorder = Clock(), Recorder()
    nodes = [Site().node(clock, RANKS) for _ in range(3)]
    cluster = SmallCluster(nodes, recorder, RANKS, 58)
    for at in range(7):
        cluster.submit(Arrival(str(at), 0.0, 20, 5, at % 4))
    assert [sum(facts.num_requests for facts in told) for _, told in recorder.told] == list(range(7))
    assert cluster.num_by_node == Counter({"0": 3, "1": 2, "2": 2})
    clock.run()
    assert [facts.num_requests for facts in cluster.facts()] == [0, 0, 0]
    assert all(ask.num_answer_tokens == 58 for ask, _ in recorder.told)
    assert {ask.rank for ask, _ in recorder.told} == set(RANKS)
    assert sum(len(node.ended) for node in nodes) == 7


def test_a_model_that_counts_tokens_gives_the_times_of_steps_and_tells_the_kernels_apart() -> None:
    for kernel in routing.KERNEL_NAMES:
        *_, with_tokens = profiled(kernel)
        cost = cost_of(kernel)
        batch = Ranks(20, 20 * 8 + 56, 64)
        exact = cost.step_s((), 20, 20 * 60, cost.kernel({8: 19, 64: 1}))
        assert with_tokens.seconds(batch, 20 * 60) == pytest.approx(exact, rel=0.01)

"""CaraServe's router: the small node is the emulated node in all that a router sees, and routers differ as their table says."""

from __future__ import annotations

import random
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
from bench.emulated.small_node import Served, SmallNode
from bench.measures import quantile
from engine_bridge.protocol.node_facts import Ranks

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


def test_models_fit_as_well_as_the_papers_and_tell_the_kernels_apart() -> None:
    for kernel in routing.KERNEL_NAMES:
        decode, _, with_tokens = profiled(kernel)
        assert decode.r2 > 0.96 and with_tokens.r2 > 0.999
        cost = cost_of(kernel)
        batch = Ranks(20, 20 * 8 + 56, 64)
        exact = cost.step_s((), 20, 20 * 60, cost.kernel({8: 19, 64: 1}))
        assert with_tokens.model.seconds(batch, 20 * 60) == pytest.approx(exact, rel=0.01)

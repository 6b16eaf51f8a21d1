"""CaraServe's router: the small node is the emulated node in all that a router sees, and routers differ as their table says."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from bench.emulated.core.adapters import AdapterMemory
from bench.emulated.core.arrivals import Arrival
from bench.emulated.core.clock import Clock
from bench.emulated.core.node import Engine
from bench.emulated.core.plays import play_on_node
from bench.emulated.core.steps import VLLM, pool_blocks
from bench.emulated.core.traffic import functions, play, poisson, weighted
from bench.emulated.routing import RANKS, cost_of, lengths
from bench.emulated.small_node import Served, SmallNode
from bench.measures import quantile

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

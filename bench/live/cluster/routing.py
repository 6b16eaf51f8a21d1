"""People who read and type, on two nodes: with advisories, by which sessions move, and without.

Everybody has begun on one node when the other joins, as after it was restarted or bought. Sticky sessions stay where they are; for them the new node
is as good as drained, which is how that arm is played. How often people ask follows what one node answers, measured anew before each repeat: more
than it can (OVERLOAD), as when a team buys a second one.
"""

from __future__ import annotations

import statistics
from typing import Any

import aiohttp

from bench.intervals import Aim, quantile_ratio, quantile_ratio_interval, verdict
from bench.live.cluster.people import People, capacity
from bench.live.cluster.servers import Server
from bench.live.shared.rounds import in_turn
from bench.measures import quantile

# Questions that people would ask without waiting, over the answers of one node. Chosen: two nodes are three quarters busy.
OVERLOAD = 1.5
P99_AIM = Aim(0.7, is_most=True)
ARMS = ("sticky", "advised", "unannounced")


async def joined(http: aiohttp.ClientSession, server: Server, *, is_quick: bool) -> dict[str, Any]:
    """Measure a node that joins at the end of each warm-up. The people are the same in all arms, which take turns; only `advised` advises.

    server: with two nodes. is_quick: fewer and shorter plays, without the arm of which no figure is claimed, sessions that move without advisories.
    Returns P99 of the time to the first token of each arm over that of sticky sessions; the most requests at a node over the median node's, with
    advisories.
    """
    arms = ARMS[:2] if is_quick else ARMS
    # Plays of each arm, and the seconds of each after its warm-up.
    repeats, seconds = (2, 25.0) if is_quick else (4, 45.0)
    played: dict[str, list[People]] = {arm: [] for arm in arms}
    capacities = []
    *_, last = [node["id"] for node in await server.nodes(http)]
    for repeat in range(repeats):
        await server.drain(last)
        one_node = await capacity(http, server, f"joined-{repeat}")
        await server.reopen(last)
        pause_s = one_node.pause_s(OVERLOAD, repeat)
        found = {"turns_per_s": one_node.turns_per_s, "answer_s": one_node.answer_s, "pause_s": pause_s}
        capacities.append({name: round(value, 2) for name, value in found.items()})
        for arm in in_turn(arms, repeat):
            people = People(http, server, f"joined-{arm}", repeat, pause_s, advises=arm == "advised")
            await server.drain(last)
            await people.live(seconds, None if arm == "sticky" else lambda: server.reopen(last))
            played[arm].append(people)
    await server.reopen(last)
    ttft_s = {arm: [each.ttft_s for each in people] for arm, people in played.items()}
    figures = {arm: _outcome(people) for arm, people in played.items()}
    lies_in = quantile_ratio_interval(ttft_s["advised"], ttft_s["sticky"], 0.99)
    return {
        f"{arm}_vs_sticky_ttft_p99": round(quantile_ratio(ttft_s[arm], ttft_s["sticky"], 0.99), 3)
        for arm in arms[1:]
    } | {
        "routing_confidence": {"interval": lies_in, "verdict": verdict(lies_in, P99_AIM)},
        "imbalance_max_vs_median": figures["advised"]["imbalance"],
        "routing": {"load": OVERLOAD, "one_node": capacities} | figures,
    }


def _outcome(plays: list[People]) -> dict[str, Any]:
    """num_requests: at each node, by play."""
    ttft_s = [each for play in plays for each in play.ttft_s]
    num_requests = [[statistics.fmean(node) for node in zip(*play.loads, strict=True)] for play in plays]
    loads = [statistics.fmean(node) for node in zip(*num_requests, strict=True)]
    return {
        "num": len(ttft_s),
        "ttft_p50_ms": round(quantile(ttft_s, 0.5) * 1e3, 1),
        "ttft_p99_ms": round(quantile(ttft_s, 0.99) * 1e3, 1),
        "num_requests": [[round(node, 1) for node in play] for play in num_requests],
        "imbalance": round(max(loads) / statistics.median(loads), 3),
    }

"""People who read and type, on two nodes: with advisories, by which sessions move, and without.

`joined`: everybody has begun on one node when the other joins, as after it was restarted or bought. Sticky sessions stay where they are; for them the
new node is as good as drained, which is how that arm is played. How often people ask follows what one node answers, measured anew before each
repeat: more than it can (OVERLOAD), as when a team buys a second one, and less (EASY), where little is left to win.

`even`: everybody begins when both are there, so that sessions are about even by themselves and a move can win little.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.intervals import Aim, quantile_ratio, quantile_ratio_interval, verdict
from bench.live.cluster.people import EASY_WARM_UP_S, WARM_UP_S, People, capacity
from bench.live.cluster.servers import Server
from bench.measures import quantile

# What people would ask over what one node answers, if nobody had to wait. Chosen: two nodes, and one, have three quarters of what they can do.
OVERLOAD, EASY = 1.5, 0.75
# Where one node keeps up, and where sessions are even by themselves, advisories may not cost anything.
P99_AIM, EASY_AIM, EVEN_AIM = Aim(0.7, is_most=True), Aim(1.0, is_most=True), Aim(1.0, is_most=True)


@dataclass(frozen=True)
class Round:
    """What is played, each time with the same people in all arms. load: what people would ask over what one node answers."""

    http: aiohttp.ClientSession
    server: Server
    repeats: int
    seconds: float
    load: float = OVERLOAD
    warm_up_s: float = WARM_UP_S

    async def play(self, name: str, arms: Sequence[str], *, joins: bool) -> Played:
        """In turns that are reversed every time. Only `advised` advises. joins: the last node does, at the end of the warm-up, but for `sticky`."""
        played = Played({arm: [] for arm in arms}, [])
        *_, last = [node["id"] for node in await self.server.nodes(self.http)]
        for repeat in range(self.repeats):
            await self.server.drain(last)
            one_node = await capacity(self.http, self.server, f"{name}-{repeat}")
            await self.server.reopen(last)
            pause_s = one_node.pause_s(self.load, repeat)
            played.one_node.append(one_node.figures() | {"pause_s": round(pause_s, 2)})
            for arm in reversed(arms) if repeat % 2 else arms:
                who, advises = f"{name}-{arm}", arm == "advised"
                people = People(
                    self.http,
                    self.server,
                    who,
                    repeat,
                    pause_s,
                    advises=advises,
                    warm_up_s=self.warm_up_s,
                )
                if joins:
                    await self.server.drain(last)
                later = joins and arm != "sticky"
                await people.live(self.seconds, (lambda: self.server.reopen(last)) if later else None)
                played.people[arm].append(people)
        await self.server.reopen(last)
        return played


@dataclass(frozen=True)
class Played:
    """By arm; and what one node answered before each repeat."""

    people: dict[str, list[People]]
    one_node: list[dict[str, float]]

    def p99_ratio(self, arm: str, other: str) -> float:
        """Of the times to the first token."""
        return round(quantile_ratio(self._ttft_s(arm), self._ttft_s(other), 0.99), 3)

    def confidence(self, arm: str, other: str, aim: Aim) -> dict[str, Any]:
        """Where the ratio lies at 95%, and what that says of its aim."""
        lies_in = quantile_ratio_interval(self._ttft_s(arm), self._ttft_s(other), 0.99)
        return {"interval": lies_in, "verdict": verdict(lies_in, aim)}

    def figures(self) -> dict[str, Any]:
        return {"one_node": self.one_node} | {arm: _outcome(each) for arm, each in self.people.items()}

    def _ttft_s(self, arm: str) -> list[list[float]]:
        return [each.ttft_s for each in self.people[arm]]


async def joined(
    http: aiohttp.ClientSession, server: Server, repeats: int, seconds: float, *, is_quick: bool
) -> dict[str, Any]:
    """Of a node that joins at the end of each warm-up: P99 of the time to the first token with advisories over that of sticky sessions, and the most
    requests at a node over the median node's, with advisories. Unless it must be quick, also what the router does for those without advisories, and
    the same where one node keeps up."""
    arms = ("sticky", "advised") if is_quick else ("sticky", "advised", "unannounced")
    played = await Round(http, server, repeats, seconds).play("joined", arms, joins=True)
    figures, ratios = played.figures(), {arm: played.p99_ratio(arm, "sticky") for arm in arms[1:]}
    result = {f"{arm}_vs_sticky_ttft_p99": ratio for arm, ratio in ratios.items()} | {
        "routing_confidence": played.confidence("advised", "sticky", P99_AIM),
        "imbalance_max_vs_median": figures["advised"]["imbalance"],
        "routing": {"load": OVERLOAD} | figures,
    }
    if is_quick:
        return result
    easy = await Round(http, server, repeats, seconds, EASY, EASY_WARM_UP_S).play(
        "easy", arms[:2], joins=True
    )
    return result | {
        "easy_confidence": easy.confidence("advised", "sticky", EASY_AIM),
        "easy_advised_vs_sticky_ttft_p99": easy.p99_ratio("advised", "sticky"),
        "easy": {"load": EASY} | easy.figures(),
    }


async def even(http: aiohttp.ClientSession, server: Server, repeats: int, seconds: float) -> dict[str, Any]:
    """The same of nodes that are there from the beginning: with advisories over without."""
    arms = ("unannounced", "advised")
    played = await Round(http, server, repeats, seconds).play("even", arms, joins=False)
    figures = played.figures()
    return {
        "even_confidence": played.confidence("advised", "unannounced", EVEN_AIM),
        "even_advised_vs_unannounced_ttft_p99": played.p99_ratio("advised", "unannounced"),
        "even_imbalance_max_vs_median": figures["advised"]["imbalance"],
        "even": {"load": OVERLOAD} | figures,
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
        "slowest": sorted((each for play in plays for each in play.answers), reverse=True)[:5],
    }

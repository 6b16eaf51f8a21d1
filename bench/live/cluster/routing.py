"""People who read and type, on two nodes: with advisories, by which sessions move, and without.

`joined`: everybody has begun on one node when the other joins, as after it was restarted or bought. Sticky sessions stay where they are; for them the
new node is as good as drained, which is how that arm is played. `even`: everybody begins when both are there, so that sessions are about even by
themselves and a move can win little.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from bench.intervals import Aim, quantile_ratio, quantile_ratio_interval, verdict
from bench.live.cluster.servers import MODEL, Server, complete, num_requests
from bench.live.peers.play import text
from bench.measures import quantile

NUM_PEOPLE, FIRST_TOKENS, QUESTION_TOKENS, LEAD_S = 32, 192, 48, 1.0
# Standard deviation of the logarithm of how often people ask. Chosen: the busiest tenth ask about half of all questions.
SPREAD = 1.3
# Mean seconds between an answer's end and the next question. Chosen.
THINK_S = 8.0
# First questions have no KV anywhere. They come spread over this time, which is not counted: it would decide the P99.
WARM_UP_S = 12.0
# What was queued on one node when another joined is answered there; how even nodes are is looked at from so long after the warm-up on. Chosen.
SETTLE_S = 10.0
# Whose conversation grows beyond this begins another one.
MAX_TOKENS = 3400
# Where sessions are even by themselves, advisories may not cost anything.
P99_AIM, EVEN_AIM = Aim(0.7, is_most=True), Aim(1.0, is_most=True)


class People:
    """The people of one repeat: as busy, with questions and answers as long, in both arms."""

    def __init__(
        self, http: aiohttp.ClientSession, server: Server, arm: str, repeat: int, *, advises: bool
    ) -> None:
        self._http, self._server, self._repeat, self._advises = http, server, repeat, advises
        self._name = f"{arm}-{repeat}"
        self.ttft_s: list[float] = []
        self.answers: list[tuple[float, int, int]] = []
        """Milliseconds to the first token, tokens of the prompt, and of these in cache."""
        self.loads: list[list[int]] = []

    async def live(self, seconds: float, when_warm: Callable[[], Awaitable[None]] | None = None) -> None:
        """seconds: without those of the warm-up, at whose end `when_warm` is called."""
        self._count_from_s = time.monotonic() + WARM_UP_S
        until_s = self._count_from_s + seconds
        watching = asyncio.create_task(self._watch(until_s))
        people = asyncio.gather(*(self._person(number, until_s) for number in range(NUM_PEOPLE)))
        if when_warm is not None:
            await asyncio.sleep(WARM_UP_S)
            await when_warm()
        await people
        await watching

    async def _person(self, number: int, until_s: float) -> None:
        rng = random.Random(f"person {number} of {self._repeat}")
        session_id, num_sessions = f"{self._name}-{number}", 1
        mean_s = THINK_S * rng.lognormvariate(-(SPREAD**2) / 2, SPREAD)
        history = text(FIRST_TOKENS, self._name, number)
        await asyncio.sleep(rng.uniform(0, WARM_UP_S))
        while (asked_s := time.monotonic()) < until_s:
            first_s, answer, num_cached = await complete(
                self._http, self._server, history, rng.randint(8, 64), session_id
            )
            if asked_s >= self._count_from_s:
                self.ttft_s.append(first_s)
                self.answers.append((round(first_s * 1e3, 1), len(history), num_cached))
            history = history + answer + text(QUESTION_TOKENS, self._name, number, len(history))
            if len(history) > MAX_TOKENS:
                num_sessions += 1
                session_id = f"{self._name}-{number}-{num_sessions}"
                history = text(FIRST_TOKENS, session_id)
            pause_s = rng.expovariate(1 / mean_s) + LEAD_S
            await asyncio.sleep(min(pause_s - LEAD_S, max(until_s - time.monotonic(), 0)))
            # Who does not ask any more does not type either.
            if self._advises and time.monotonic() + LEAD_S < until_s:
                await self._advise(session_id)
            await asyncio.sleep(LEAD_S)

    async def _advise(self, session_id: str) -> None:
        body = {"session_id": session_id, "model": MODEL, "expected_arrival_s": LEAD_S}
        async with self._http.post(f"{self._server.url}/v1/advisories", json=body) as reply:
            await reply.read()

    async def _watch(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            nodes = await self._server.nodes(self._http)
            if time.monotonic() >= self._count_from_s + SETTLE_S:
                self.loads.append([num_requests(node) for node in nodes])
            await asyncio.sleep(0.25)


async def joined(
    http: aiohttp.ClientSession, server: Server, repeats: int, seconds: float, *, is_quick: bool
) -> dict[str, Any]:
    """Of a node that joins at the end of each warm-up: P99 of the time to the first token with advisories over that of sticky sessions, and the most
    requests at a node over the median node's, with advisories. Unless it must be quick, also what the router does for those without advisories."""
    *_, last = [node["id"] for node in await server.nodes(http)]

    async def play(people: People, arm: str) -> None:
        await server.drain(last)
        await people.live(seconds, None if arm == "sticky" else lambda: server.reopen(last))

    arms = ("sticky", "advised") if is_quick else ("sticky", "advised", "unannounced")
    plays = await _play(http, server, "joined", arms, repeats, play)
    await server.reopen(last)
    ratio, lies_in = _p99_ratio(plays["advised"], plays["sticky"])
    found = {arm: _outcome(each) for arm, each in plays.items()}
    others = {arm: _p99_ratio(plays[arm], plays["sticky"])[0] for arm in arms[2:]}
    return {f"{arm}_vs_sticky_ttft_p99": other for arm, other in others.items()} | {
        "routing_confidence": {"interval": lies_in, "verdict": verdict(lies_in, P99_AIM)},
        "advised_vs_sticky_ttft_p99": ratio,
        "imbalance_max_vs_median": found["advised"]["imbalance"],
        "routing": found,
    }


async def even(http: aiohttp.ClientSession, server: Server, repeats: int, seconds: float) -> dict[str, Any]:
    """The same of nodes that are there from the beginning: with advisories over without."""
    arms = ("unannounced", "advised")
    plays = await _play(http, server, "even", arms, repeats, lambda people, arm: people.live(seconds))
    ratio, lies_in = _p99_ratio(plays["advised"], plays["unannounced"])
    found = {arm: _outcome(each) for arm, each in plays.items()}
    return {
        "even_confidence": {"interval": lies_in, "verdict": verdict(lies_in, EVEN_AIM)},
        "even_advised_vs_unannounced_ttft_p99": ratio,
        "even_imbalance_max_vs_median": found["advised"]["imbalance"],
        "even": found,
    }


async def _play(
    http: aiohttp.ClientSession,
    server: Server,
    part: str,
    arms: tuple[str, ...],
    repeats: int,
    play: Callable[[People, str], Awaitable[None]],
) -> dict[str, list[People]]:
    """By arm, in turns that are reversed every time. Only `advised` advises."""
    plays: dict[str, list[People]] = {arm: [] for arm in arms}
    for repeat in range(repeats):
        for arm in reversed(arms) if repeat % 2 else arms:
            people = People(http, server, f"{part}-{arm}", repeat, advises=arm == "advised")
            await play(people, arm)
            plays[arm].append(people)
    return plays


def _p99_ratio(some: list[People], others: list[People]) -> tuple[float, tuple[float, float] | None]:
    """Of the times to the first token, and where it lies at 95%."""
    rounds, other_rounds = [each.ttft_s for each in some], [each.ttft_s for each in others]
    lies_in = quantile_ratio_interval(rounds, other_rounds, 0.99)
    return round(quantile_ratio(rounds, other_rounds, 0.99), 3), lies_in


def _outcome(plays: list[People]) -> dict[str, Any]:
    ttft_s = [each for play in plays for each in play.ttft_s]
    loads = [
        statistics.fmean(node) for node in zip(*(row for play in plays for row in play.loads), strict=True)
    ]
    return {
        "num": len(ttft_s),
        "ttft_p50_ms": round(quantile(ttft_s, 0.5) * 1e3, 1),
        "ttft_p99_ms": round(quantile(ttft_s, 0.99) * 1e3, 1),
        "imbalance": round(max(loads) / statistics.median(loads), 3),
        "slowest": sorted((each for play in plays for each in play.answers), reverse=True)[:5],
    }

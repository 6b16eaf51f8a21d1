"""People who read and type, on two nodes: with advisories, which may move a session, and without, when sessions stay where they are."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any

import aiohttp

from bench.intervals import Aim, quantile_ratio_interval, verdict
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
# Whose conversation grows beyond this begins another one.
MAX_TOKENS = 3400
P99_AIM = Aim(0.7, is_most=True)


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

    async def live(self, seconds: float) -> None:
        """seconds: without those of the warm-up."""
        self._count_from_s = time.monotonic() + WARM_UP_S
        until_s = self._count_from_s + seconds
        watching = asyncio.create_task(self._watch(until_s))
        await asyncio.gather(*(self._person(number, until_s) for number in range(NUM_PEOPLE)))
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
            if self._advises:
                await self._advise(session_id)
            await asyncio.sleep(LEAD_S)

    async def _advise(self, session_id: str) -> None:
        body = {"session_id": session_id, "model": MODEL, "expected_arrival_s": LEAD_S}
        async with self._http.post(f"{self._server.url}/v1/advisories", json=body) as reply:
            await reply.read()

    async def _watch(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            nodes = await self._server.nodes(self._http)
            if time.monotonic() >= self._count_from_s:
                self.loads.append([num_requests(node) for node in nodes])
            await asyncio.sleep(0.25)


async def advised_vs_sticky(
    http: aiohttp.ClientSession, server: Server, repeats: int, seconds: float
) -> dict[str, Any]:
    """P99 of the time to the first token with advisories over that without; the most requests at a node over the median node's, both over the run."""
    arms: dict[str, list[People]] = {"advised": [], "sticky": []}
    for repeat in range(repeats):
        names = list(arms) if repeat % 2 else list(reversed(arms))
        for name in names:
            people = People(http, server, name, repeat, advises=name == "advised")
            await people.live(seconds)
            arms[name].append(people)
    found: dict[str, Any] = {}
    for name, plays in arms.items():
        ttft_s = [each for play in plays for each in play.ttft_s]
        loads = [
            statistics.fmean(node)
            for node in zip(*(row for play in plays for row in play.loads), strict=True)
        ]
        found[name] = {
            "num": len(ttft_s),
            "ttft_p50_ms": round(quantile(ttft_s, 0.5) * 1e3, 1),
            "ttft_p99_ms": round(quantile(ttft_s, 0.99) * 1e3, 1),
            "imbalance": round(max(loads) / statistics.median(loads), 3),
            "slowest": sorted((each for play in plays for each in play.answers), reverse=True)[:5],
        }
    rounds = {name: [play.ttft_s for play in plays] for name, plays in arms.items()}
    lies_in = quantile_ratio_interval(rounds["advised"], rounds["sticky"], 0.99)
    return {
        "routing_confidence": {"interval": lies_in, "verdict": verdict(lies_in, P99_AIM)},
        "advised_vs_sticky_ttft_p99": round(
            found["advised"]["ttft_p99_ms"] / found["sticky"]["ttft_p99_ms"], 3
        ),
        "imbalance_max_vs_median": found["advised"]["imbalance"],
        "routing": found,
    }

"""People who read and type, for nodes of any speed: how often they ask follows what one node answers."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from bench.live.cluster.servers import MODEL, Server, complete, num_requests
from bench.live.peers.play import text

NUM_PEOPLE, FIRST_TOKENS, QUESTION_TOKENS, LEAD_S = 32, 192, 48, 1.0
# Standard deviation of the logarithm of how long people pause. Chosen: the busiest tenth ask about half of all questions.
SPREAD = 1.3
# First questions have no KV anywhere and would decide the P99: they arrive spread over the warm-up, which is not counted. One node answers them in
# about that time.
WARM_UP_S = 12.0
# Requests queued on one node before another joins are answered there, so the nodes' loads count from SETTLE_S after the warm-up. Chosen.
SETTLE_S = 10.0
# A person whose conversation grows beyond this begins another one.
MAX_TOKENS = 3400
# A node's capacity is measured for MEASURED_S, after FILLING_S in which the first questions are answered.
MEASURED_S, FILLING_S = 10.0, 5.0
MOST_PAUSE_S = 3600.0


@dataclass(frozen=True)
class Capacity:
    """The rate at which one node answers when everybody asks as soon as they have an answer.

    Attributes:
        turns_per_s: answers per second.
        answer_s: seconds from a turn's first token to its last, in full batches.
    """

    turns_per_s: float
    answer_s: float

    def pause_s(self, load: float, repeat: int) -> float:
        """Return the mean pause in seconds between an answer and the next question.

        With it a repeat's people ask `load` times what the node answers, if no question has to wait; 0 if they cannot ask that often.
        """
        from scipy.optimize import brentq  # which is slow to import

        def surplus_per_s(pause_s: float) -> float:
            """Return how many more questions a second people would ask with this pause."""
            return self._asked_per_s(pause_s, repeat) - load * self.turns_per_s

        return brentq(surplus_per_s, 0.0, MOST_PAUSE_S) if surplus_per_s(0.0) > 0 else 0.0

    def _asked_per_s(self, pause_s: float, repeat: int) -> float:
        weights = (_weight(_person(number, repeat)) for number in range(NUM_PEOPLE))
        return sum(1 / (pause_s * weight + LEAD_S + self.answer_s) for weight in weights)


async def capacity(http: aiohttp.ClientSession, server: Server, name: str) -> Capacity:
    """Measure the capacity of the open nodes with the sizes of questions and answers that are played."""
    rng = random.Random(name)
    count_from_s = time.monotonic() + FILLING_S
    ends_s, answer_s = list[float](), list[float]()

    async def ask_on(number: int) -> None:
        """Ask one question after the other until the time is up."""
        history = text(FIRST_TOKENS, name, number)
        while (asked_s := time.monotonic()) < count_from_s + MEASURED_S:
            first_s, answer, _ = await complete(http, server, history, rng.randint(8, 64), f"{name}-{number}")
            ends_s.append(time.monotonic())
            answer_s.append(ends_s[-1] - asked_s - first_s)
            history = history + answer + text(QUESTION_TOKENS, name, number, len(history))

    await asyncio.gather(*(ask_on(number) for number in range(NUM_PEOPLE)))
    counted = [
        each for end_s, each in zip(ends_s, answer_s, strict=True) if 0 <= end_s - count_from_s < MEASURED_S
    ]
    return Capacity(len(counted) / MEASURED_S, statistics.fmean(counted))


class People:
    """The people of one repeat: as busy, with questions and answers as long, in all arms.

    Args:
        pause_s: on average between an answer's end and the next question, the typing of which is not counted.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        server: Server,
        arm: str,
        repeat: int,
        pause_s: float,
        *,
        advises: bool,
    ) -> None:
        self._http, self._server, self._repeat, self._advises = http, server, repeat, advises
        self._pause_s = pause_s
        self._name = f"{arm}-{repeat}"
        self.ttft_s: list[float] = []
        self.loads: list[list[int]] = []

    async def live(self, seconds: float, when_warm: Callable[[], Awaitable[None]] | None = None) -> None:
        """Let all people ask. seconds: how long questions count, after the warm-up. when_warm: called at the end of the warm-up."""
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
        rng = _person(number, self._repeat)
        session_id, num_sessions = f"{self._name}-{number}", 1
        mean_s = self._pause_s * _weight(rng)
        history = text(FIRST_TOKENS, self._name, number)
        await asyncio.sleep(rng.uniform(0, WARM_UP_S))
        while (asked_s := time.monotonic()) < until_s:
            first_s, answer, _ = await complete(
                self._http, self._server, history, rng.randint(8, 64), session_id
            )
            if asked_s >= self._count_from_s:
                self.ttft_s.append(first_s)
            history = history + answer + text(QUESTION_TOKENS, self._name, number, len(history))
            if len(history) > MAX_TOKENS:
                num_sessions += 1
                session_id = f"{self._name}-{number}-{num_sessions}"
                history = text(FIRST_TOKENS, session_id)
            pause_s = mean_s * rng.expovariate(1)
            await asyncio.sleep(min(pause_s, max(until_s - time.monotonic(), 0)))
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


def _person(number: int, repeat: int) -> random.Random:
    return random.Random(f"person {number} of {repeat}")


def _weight(person: random.Random) -> float:
    """Return how much longer than the average this person pauses; the mean over people is 1."""
    return person.lognormvariate(-(SPREAD**2) / 2, SPREAD)

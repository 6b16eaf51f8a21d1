"""Requests of `bench.live.scheduling`: the lengths of a recorded trace, adapters by a law, and what fills tight memory."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.data import AZURE, lines_of
from bench.live.adapter_law import ANSWER_PERCENTILES, PROMPT_PERCENTILES, Adapters, drawn
from bench.live.peers.adapters import Ask
from bench.live.peers.play import text

LENGTH_SCALE = 8
HISTORY, WARM_UP_REQUESTS = 2000, 60
# Answers that grow far beyond what the prompts let expect.
TIGHT_PROMPT_TOKENS, TIGHT_ANSWER_TOKENS, TIGHT_RATE_PER_S = (32, 128), (256, 512), 4.0


@dataclass(frozen=True)
class Lengths:
    """Of one request of the trace, scaled, in tokens."""

    prompt: int
    answer: int


def lengths_of_trace(path: Path = AZURE) -> list[Lengths]:
    """All requests of the trace, scaled; where it is missing, from its percentiles, prompt and answer on their own."""
    if path.is_file():
        rows = csv.DictReader(lines_of(path))
        pairs = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    else:
        print("  the trace is not here: lengths are drawn from its percentiles", flush=True)
        chance = random.Random("lengths")
        pairs = [
            (round(drawn(PROMPT_PERCENTILES, chance)), round(drawn(ANSWER_PERCENTILES, chance)))
            for _ in range(20_000)
        ]
    return [Lengths(max(p // LENGTH_SCALE, 2), max(a // LENGTH_SCALE, 1)) for p, a in pairs]


class BaseModelOnly:
    """In the place of adapters: nobody asks for one."""

    def drawn(self, chance: random.Random) -> str | None:
        return None


@dataclass
class Traffic:
    """Requests by the trace's lengths and Chameleon's law of adapters."""

    lengths: list[Lengths]
    adapters: Adapters
    history: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        chance = random.Random("history")
        chance.shuffle(self.lengths)
        seen, self.lengths = self.lengths[:HISTORY], self.lengths[HISTORY:]
        self.history = [[each.prompt, each.answer, self.adapters.drawn(chance)] for each in seen]
        prompts = sorted(each.prompt for each in seen)
        self._quartiles = [prompts[len(prompts) * place // 4] for place in (1, 2, 3)]

    def asks(self, rate_per_s: float, seconds: float, *seed: object) -> list[Ask]:
        """Poisson arrivals."""
        chance = random.Random(f"arrivals {seed}")
        asks: list[Ask] = []
        at_s = chance.expovariate(rate_per_s)
        while at_s < seconds:
            asks.append(self._ask(at_s, chance, len(asks), *seed))
            at_s += chance.expovariate(rate_per_s)
        return asks

    def warm_up(self, *seed: object) -> list[Ask]:
        """Short requests for adapters by the same law."""
        chance = random.Random(f"warm-up {seed}")
        return [
            Ask(at_s=0.0, prompt=text(4, "warm", number), max_tokens=1, adapter=self.adapters.drawn(chance))
            for number in range(WARM_UP_REQUESTS)
        ]

    def burst(self, num_requests: int, *seed: object) -> list[Ask]:
        chance = random.Random(f"burst {seed}")
        return [self._ask(0.0, chance, number, "burst", *seed) for number in range(num_requests)]

    def _ask(self, at_s: float, chance: random.Random, number: int, *seed: object) -> Ask:
        lengths = chance.choice(self.lengths)
        return Ask(
            at_s=at_s,
            prompt=text(lengths.prompt, "scheduling", *seed, number),
            max_tokens=lengths.answer,
            adapter=self.adapters.drawn(chance),
            priority=sum(lengths.prompt >= limit for limit in self._quartiles),
        )


def tight_asks(num_requests: int, *seed: object) -> list[Ask]:
    """Short prompts, long answers, faster than they can be answered."""
    chance = random.Random(f"tight {seed}")
    asks, at_s = [], 0.0
    for number in range(num_requests):
        prompt = text(chance.randint(*TIGHT_PROMPT_TOKENS), "tight", *seed, number)
        asks.append(Ask(at_s=at_s, prompt=prompt, max_tokens=chance.randint(*TIGHT_ANSWER_TOKENS)))
        at_s += chance.expovariate(TIGHT_RATE_PER_S)
    return asks

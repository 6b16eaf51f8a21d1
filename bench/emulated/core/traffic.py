"""Requests: lengths as recorded or generated, arrivals by a Poisson process, adapters by Chameleon's law.

Lengths: Azure's conversation trace of 2023 (Patel et al., ISCA 2024; CC-BY-4.0) where it is beside the project, else drawn between its
quantiles, which stand below, each length for itself (their rank correlation in the trace is 0.07). CaraServe's are Alpaca's, drawn about the
published means (`alpaca`).

Adapters: `Pool` is Chameleon's law, the others are CaraServe's.
"""

from __future__ import annotations

import csv
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.data import AZURE, lines_of
from bench.emulated.core.arrivals import Arrival
from bench.emulated.core.clock import Clock

RANKS = (8, 16, 32, 64, 128)

# Of the 19,366 requests of that trace: share of requests, tokens.
SHARES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
PROMPTS = (2, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 6212, 14050)
ANSWERS = (7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 954, 1000)
PROMPT_QUANTILES, ANSWER_QUANTILES = (tuple(zip(SHARES, each, strict=True)) for each in (PROMPTS, ANSWERS))

# Alpaca: mean tokens and sigma of their logarithm. The means are published (Kwon et al., vLLM, SOSP 2023, Fig. 11); the sigmas are read off some
# dozens of its published examples, whose answers have a mean of twice the median. Cut at the longest answers of the text model that wrote them.
ALPACA_PROMPT = (19.31, 0.6)
ALPACA_ANSWER = (58.45, 1.1)
ALPACA_MOST_TOKENS = 1024

# Azure's functions of 2019, share of them and invocations a day. Source: Shahrad et al., Serverless in the Wild, ATC 2020, §3.2: 45% are invoked once
# an hour or less, 18.6% once a minute or more, rates span eight orders of magnitude over the two weeks; it counts applications. 2.6% of functions
# are invoked once a second or more, by a later study of the same trace. Between these, logarithms are linear. A check on a figure that was not
# put in: the 18.6% have 99.7% of all invocations, published: 99.6%.
FUNCTION_QUANTILES = ((0.0, 1 / 14), (0.45, 24.0), (0.814, 1440.0), (0.974, 86_400.0), (1.0, 1e8 / 14))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Pairs of prompt and answer tokens in the trace's order."""

    pairs: tuple[tuple[int, int], ...]

    def fitted(self, max_tokens: int) -> Lengths:
        """Return the lengths cut to what a model takes: the answer to half of it, the prompt to what that leaves."""
        pairs = []
        for prompt, answer in self.pairs:
            answer = min(answer, max_tokens // 2)
            pairs.append((min(prompt, max_tokens - answer), answer))
        return Lengths(tuple(pairs))

    def scaled(self, share: float) -> Lengths:
        """Return all lengths times this share, at least one token each."""
        return Lengths(tuple((max(round(p * share), 1), max(round(a * share), 1)) for p, a in self.pairs))


def azure(path: Path = AZURE) -> Lengths:
    """Return the trace's lengths if the file is there, else generated ones."""
    if not path.exists():
        return generated(random.Random(0))
    rows = csv.DictReader(lines_of(path))
    return Lengths(tuple((int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows))


def generated(rng: random.Random, num: int = 19_366) -> Lengths:
    """Return as many pairs as asked for, drawn from the trace's quantiles."""
    pairs = tuple(
        (drawn(PROMPT_QUANTILES, rng.random()), drawn(ANSWER_QUANTILES, rng.random())) for _ in range(num)
    )
    return Lengths(pairs)


def drawn(quantiles: Sequence[tuple[float, int]], share: float) -> int:
    """Return the length below which that share lies, linear between the quantiles."""
    return round(between(quantiles, share))


def between(quantiles: Sequence[tuple[float, float]], share: float) -> float:
    """Return the value below which that share lies, linear between the quantiles."""
    at = min(max(bisect_right(quantiles, share, key=lambda point: point[0]), 1), len(quantiles) - 1)
    (low, short), (high, long) = quantiles[at - 1], quantiles[at]
    return short + (long - short) * (share - low) / (high - low)


def alpaca(num: int = 20_000) -> Lengths:
    """Return lengths of Alpaca's instructions and answers: log-normal about the published means."""
    rng = random.Random("alpaca 0")

    def length(mean_tokens: float, sigma: float) -> int:
        """Return a random length in tokens."""
        tokens = rng.lognormvariate(math.log(mean_tokens) - sigma * sigma / 2, sigma)
        return min(max(round(tokens), 1), ALPACA_MOST_TOKENS)

    return Lengths(tuple((length(*ALPACA_PROMPT), length(*ALPACA_ANSWER)) for _ in range(num)))


@dataclass(frozen=True, slots=True)
class Pool:
    """Adapters, the same number of each rank; their ids count through the ranks.

    Source: Chameleon §5.1: a power law over ranks, small ones asked for most, uniform within a rank. It does not give the exponent; 1 here,
    over the ranks' places. Chosen.
    """

    num_adapters: int = 100
    ranks: tuple[int, ...] = RANKS

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The adapters' ranks, by id."""
        each = self.num_adapters // len(self.ranks)
        return tuple(rank for rank in self.ranks for _ in range(each))

    def dealt(self, num: int, rng: random.Random) -> list[int]:
        """Return adapters by the power law over ranks."""
        each = self.num_adapters // len(self.ranks)
        weights = [(1 + at // each) ** -1.0 for at in range(each * len(self.ranks))]
        return rng.choices(range(len(weights)), weights, k=num)


Deal = Callable[[int, random.Random], Sequence[int]]
"""Deals adapters to so many requests."""


def fresh(num: int, rng: random.Random) -> Sequence[int]:
    """Deal each request an adapter that no request has asked for before. Source: CaraServe §7.1, synthetic workload."""
    return range(num)


def weighted(weights: Sequence[float]) -> Deal:
    """Return what deals adapters in proportion to their weights."""
    return lambda num, rng: rng.choices(range(len(weights)), weights, k=num)


def power_law(num_adapters: int) -> tuple[float, ...]:
    """Return weights by which the n-th adapter is asked for in proportion to 1/n."""
    return tuple((1 + at) ** -1.0 for at in range(num_adapters))


def functions(num_adapters: int, rng: random.Random) -> tuple[float, ...]:
    """Return weights like those of Azure's functions of 2019, a random sample of them by FUNCTION_QUANTILES."""
    points = [(share, math.log(per_day)) for share, per_day in FUNCTION_QUANTILES]
    return tuple(math.exp(between(points, rng.random())) for _ in range(num_adapters))


def poisson(lengths: Lengths, deal: Deal, per_s: float, span_s: float, seed: int) -> list[Arrival]:
    """Return the requests of `span_s` seconds, `per_s` a second.

    Lengths and adapters are the seed's alone: at another load the same requests come, closer together. Lengths are the trace's pairs in random order,
    each once before any comes twice: in the trace's own order, half an hour's part of it would be another workload for each seed.
    """
    rng = random.Random(f"lengths {seed}")
    num = max(round(per_s * span_s), 1)
    pairs: list[tuple[int, int]] = []
    while len(pairs) < num:
        pairs += rng.sample(lengths.pairs, len(lengths.pairs))
    adapters = deal(num, random.Random(f"adapters {seed}"))
    gaps = random.Random(f"gaps {seed}")
    found, at_s = [], 0.0
    for at, ((prompt, answer), adapter_id) in enumerate(zip(pairs, adapters, strict=False)):
        at_s += gaps.expovariate(1.0) / per_s
        found.append(Arrival(f"{at:06d}", at_s, prompt, answer, adapter_id))
    return found


def play(clock: Clock, arrivals: Sequence[Arrival], submit: Callable[[Arrival], None]) -> None:
    """Submit requests when they come, and run until no event is left. Only the next one is in the clock's heap, which stays small."""

    def come(at: int) -> None:
        """Submit the request at this place, and have the next one come at its time."""
        submit(arrivals[at])
        if at + 1 < len(arrivals):
            clock.at(arrivals[at + 1].at_s, lambda now: come(at + 1))

    clock.at(arrivals[0].at_s, lambda now: come(0))
    clock.run()

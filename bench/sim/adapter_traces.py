"""Who asks for which adapter when: generated traffic of every temper, and files.

A file is CSV: seconds or an ISO time, the adapter's name, and its bytes if they are known, in columns `time`, `adapter` and `bytes`, or in that order
without a header. Where it has no bytes they are dealt by the seed, as in generated traffic; so are the times that requests take.

What a temper leaves open its seed decides: 100, 200 or 400 adapters, ranks mixed or all alike, 2, 6 or 12 requests a second, and how many of them run
at once (from next to none, as a host tier sees it, to some 30). `cache_share` is needed where a temper means the size of the cache:
  stationary  a Zipf law over adapters, exponent 0.8 to 1.2
  ranks       a power law over ranks, small ones asked for most (Chameleon §5.1), uniform within a rank
  drift       a Zipf law where every 15, 40 or 100 requests a popular adapter changes places with any other
  phases      a Zipf law that is dealt anew three to eight times
  cohorts     4, 8 or 16 adapters for 30, 60 or 120 requests, then others: what was asked for often is not asked for again
  bursts      a Zipf law, and 43% of requests repeat the one before
  scans       a Zipf law, and every 400 or 800 requests half of all adapters once each
  loops       the same adapters again and again in one order, 1.1 to 1.5 times what the cache holds
  loop_mix    half of the requests from such a loop of twice the size, half from a Zipf law
  wonders     four in ten requests for an adapter that is never asked for again
  jobs        15 to 50 active adapters, each for a tenth of the trace or so; 40% of requests repeat the one before besides (as production adapters)
  walk        each adapter's log popularity walks at random, and 43% of requests repeat the one before
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bench.data import lines_of

RANKS = (8, 16, 32, 64, 128)
BYTES_PER_RANK = 2 << 20
"""Of a 7B model: q, k, v, o of 32 layers in 16 bits."""
PREFILL_TOKENS_PER_S = 10_000
TPOT_S = 0.02


@dataclass(frozen=True, slots=True)
class Request:
    """`busy_s`: from its adapter's being there to its last token."""

    at_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Use:
    """A request and the adapter it asks for."""

    at_s: float
    adapter_id: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    """sizes: bytes of each adapter, by its id. cache_bytes: of the cache that it meets."""

    uses: Sequence[Use]
    sizes: Sequence[int]
    cache_bytes: int


def busy_s(num_prompt_tokens: float, num_answer_tokens: float) -> float:
    return num_prompt_tokens / PREFILL_TOKENS_PER_S + num_answer_tokens * TPOT_S


def drawn_busy_s(rng: random.Random) -> float:
    """Log-normal lengths with the medians and 99th percentiles of Azure's conversation trace (answers: 930 tokens instead of 601)."""
    return busy_s(rng.lognormvariate(math.log(1020), 0.6), rng.lognormvariate(math.log(129), 0.85))


def dealt(requests: Sequence[Request], adapter_ids: Sequence[int]) -> list[Use]:
    return [Use(r.at_s, a, r.busy_s) for r, a in zip(requests, adapter_ids, strict=True)]


# -- tempers -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Dealer:
    """What a temper deals from. `sizes` grows where it makes adapters up. loop_bytes: of the adapters that lie in the cache at once."""

    rng: random.Random
    num: int
    sizes: list[int]
    loop_bytes: float

    def __post_init__(self) -> None:
        self.num_known = len(self.sizes)

    num_known: int = 0

    def zipf(self, exponent: float = 1.0, num: int | None = None, among: int | None = None) -> list[int]:
        among = among or self.num_known
        order = self.rng.sample(range(among), among)
        weights = [(1 + place) ** -exponent for place in range(among)]
        return self.rng.choices(order, weights, k=self.num if num is None else num)

    def loop(self, scale: float) -> list[int]:
        """Adapters of so much more than the cache holds, in a random order."""
        chosen: list[int] = []
        for adapter_id in self.rng.sample(range(self.num_known), self.num_known):
            if len(chosen) > 2 and sum(self.sizes[a] for a in chosen) >= scale * self.loop_bytes:
                break
            chosen.append(adapter_id)
        return chosen


def stationary(deal: Dealer) -> list[int]:
    return deal.zipf(deal.rng.uniform(0.8, 1.2))


def ranks(deal: Dealer) -> list[int]:
    place = {size: at for at, size in enumerate(sorted(set(deal.sizes)), 1)}
    return deal.rng.choices(range(deal.num_known), [1 / place[size] for size in deal.sizes], k=deal.num)


def drift(deal: Dealer) -> list[int]:
    rng, every = deal.rng, deal.rng.choice((15, 40, 100))
    now_at = list(range(deal.num_known))
    found = []
    for at, adapter_id in enumerate(sorted_by_popularity(deal)):
        if at % every == 0:
            old, new = rng.randrange(deal.num_known // 4), rng.randrange(deal.num_known)
            now_at[old], now_at[new] = now_at[new], now_at[old]
        found.append(now_at[adapter_id])
    return found


def sorted_by_popularity(deal: Dealer) -> list[int]:
    """A Zipf law over places."""
    weights = [1 / (1 + place) for place in range(deal.num_known)]
    return deal.rng.choices(range(deal.num_known), weights, k=deal.num)


def phases(deal: Dealer) -> list[int]:
    num_phases = deal.rng.choice((3, 5, 8))
    found: list[int] = []
    while len(found) < deal.num:
        found += deal.zipf(num=math.ceil(deal.num / num_phases))
    return found[: deal.num]


def cohorts(deal: Dealer) -> list[int]:
    rng, num_members, num_each = deal.rng, deal.rng.choice((4, 8, 16)), deal.rng.choice((30, 60, 120))
    found: list[int] = []
    while len(found) < deal.num:
        found += rng.choices(rng.sample(range(deal.num_known), num_members), k=num_each)
    return found[: deal.num]


def repeating(rng: random.Random, adapter_ids: Sequence[int], share: float) -> list[int]:
    """That share of them is the one before instead."""
    found: list[int] = []
    for adapter_id in adapter_ids:
        found.append(found[-1] if found and rng.random() < share else adapter_id)
    return found


def bursts(deal: Dealer) -> list[int]:
    return repeating(deal.rng, deal.zipf(0.9), 0.43)


def scans(deal: Dealer) -> list[int]:
    every, found = deal.rng.choice((400, 800)), []
    while len(found) < deal.num:
        found += deal.zipf(num=every) + deal.rng.sample(range(deal.num_known), deal.num_known // 2)
    return found[: deal.num]


def loops(deal: Dealer) -> list[int]:
    chosen = deal.loop(deal.rng.uniform(1.1, 1.5))
    return [chosen[at % len(chosen)] for at in range(deal.num)]


def loop_mix(deal: Dealer) -> list[int]:
    chosen, others = deal.loop(deal.rng.uniform(2.2, 3.0)), deal.zipf()
    found: list[int] = []
    num_looped = 0
    for other in others:
        is_looped = deal.rng.random() < 0.5
        found.append(chosen[num_looped % len(chosen)] if is_looped else other)
        num_looped += is_looped
    return found


def wonders(deal: Dealer) -> list[int]:
    found = []
    for adapter_id in deal.zipf(among=deal.num_known // 2):
        if deal.rng.random() < 0.4:
            deal.sizes.append(deal.rng.choice(RANKS) * BYTES_PER_RANK)
            found.append(len(deal.sizes) - 1)
        else:
            found.append(adapter_id)
    return found


def jobs(deal: Dealer) -> list[int]:
    rng = deal.rng
    num_active, life = rng.choice((15, 30, 50)), deal.num / rng.choice((5, 10, 20))
    coming = iter(deal.zipf(0.8, num=20 * deal.num))
    adapter_ids = [next(coming) for _ in range(num_active)]
    weights = [rng.paretovariate(1.1) for _ in range(num_active)]
    until = [rng.expovariate(1 / life) for _ in range(num_active)]
    found: list[int] = []
    for at in range(deal.num):
        for job in range(num_active):
            if until[job] < at:
                adapter_ids[job], weights[job] = next(coming), rng.paretovariate(1.1)
                until[job] = at + rng.expovariate(1 / life)
        found.append(found[-1] if found and rng.random() < 0.4 else rng.choices(adapter_ids, weights)[0])
    return found


def walk(deal: Dealer) -> list[int]:
    rng, step = deal.rng, deal.rng.choice((0.1, 0.25))
    heights = [rng.gauss(0, 1.5) for _ in range(deal.num_known)]
    found: list[int] = []
    while len(found) < deal.num:
        heights = [0.995 * height + rng.gauss(0, step) for height in heights]
        found += rng.choices(range(deal.num_known), [math.exp(height) for height in heights], k=50)
    return repeating(rng, found[: deal.num], 0.43)


TEMPERS: dict[str, Callable[[Dealer], list[int]]] = {
    f.__name__: f
    for f in (stationary, ranks, drift, phases, cohorts, bursts, scans, loops, loop_mix, wonders, jobs, walk)
}
STATIONARY = ("stationary",)


def generated(temper: str, seed: int, cache_share: float, num_requests: int) -> Workload:
    """The same for the same arguments."""
    rng = random.Random(f"{temper} {seed}")
    num_adapters = rng.choice((100, 200, 400))
    own_ranks = RANKS if rng.random() < 2 / 3 else (32,)
    sizes = [rng.choice(own_ranks) * BYTES_PER_RANK for _ in range(num_adapters)]
    cache_bytes = int(cache_share * sum(sizes))
    # A loop is what the cache sees: of requests that hardly overlap.
    scale, rate_per_s = (0.02 if temper == "loops" else rng.choice((0.02, 0.3, 1.0))), rng.choice((2, 6, 12))
    adapter_ids = TEMPERS[temper](Dealer(rng, num_requests, sizes, cache_bytes))
    at_s, uses = 0.0, []
    for adapter_id in adapter_ids:
        at_s += rng.expovariate(rate_per_s)
        uses.append(Use(at_s, adapter_id, scale * drawn_busy_s(rng)))
    return Workload(uses, sizes, cache_bytes)


# -- files -------------------------------------------------------------------------------------------------------------


def read_uses(path: Path, seed: int, cache_share: float, busy_scale: float = 0.3) -> Workload:
    """See the module's docstring. The first request comes at 0. Raises ValueError for a file without requests."""
    rows = list(csv.reader(lines_of(path)))
    columns = [name.strip().lower() for name in rows[0]] if rows else []
    if "adapter" in columns:
        places, rows = [columns.index(name) for name in ("time", "adapter")], rows[1:]
        places += [columns.index("bytes")] if "bytes" in columns else []
    else:
        places = list(range(min(len(columns), 3)))
    if not rows or len(places) < 2:
        raise ValueError(f"{path} has no requests: columns time, adapter and, if known, bytes are needed")
    rng = random.Random(f"{path.name} {seed}")
    picked = sorted(
        ([row[at].strip() for at in places] for row in rows if row), key=lambda row: seconds(row[0])
    )
    ids: dict[str, int] = {}
    sizes: list[int] = []
    start_s, uses = seconds(picked[0][0]), []
    for time, name, *num_bytes in picked:
        if name not in ids:
            ids[name] = len(sizes)
            sizes.append(int(float(num_bytes[0])) if num_bytes else rng.choice(RANKS) * BYTES_PER_RANK)
        uses.append(Use(seconds(time) - start_s, ids[name], busy_scale * drawn_busy_s(rng)))
    return Workload(uses, sizes, int(cache_share * sum(sizes)))


def seconds(text: str) -> float:
    """Of a number, or of an ISO time (100 ns are cut off)."""
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text[:26]).timestamp()

"""Is the adapters' eviction policy ever worse than LRU? Traffic of every temper against the policies that serve, in virtual time.

    python -m bench.emulated adapter_cache [--quick] [--seeds N] [--seed N] [--jobs N]

What runs: `engine_bridge.policy.adapters.adapter_cache`; the cache around it is a model. An adapter that running requests use lies in a slot, outside
the cache. When its last request ends it enters the cache (Chameleon §4.1), which then gives up what it is over its size by, the newcomer if that is
worth least. A request whose adapter is neither in a slot nor cached waits for one link, first come, first served: its bytes over the bandwidth, plus
an overhead. The cache holds 5, 10, 20 or 50% of all adapters' bytes; its size is constant, where the engine's grows and shrinks with the KV.

What a temper leaves open its seed decides: 100, 200 or 400 adapters, ranks mixed or all alike, 2, 6 or 12 requests a second, and how many of them run
at once. The policy's constants were chosen on other seeds: these begin at 1,000.
  stationary  a Zipf law over adapters, exponent 0.8 to 1.2
  drift       a Zipf law where every 15, 40 or 100 requests a popular adapter changes places with any other
  phases      a Zipf law that is dealt anew three to eight times
  cohorts     4, 8 or 16 adapters for 30, 60 or 120 requests, then others: what was asked for often is not asked for again
  scans       a Zipf law, and every 400 or 800 requests half of all adapters once each
  loops       the same adapters again and again in one order, 1.1 to 1.5 times what the cache holds
  wonders     four in ten requests for an adapter that is never asked for again
  jobs        15 to 50 active adapters, each for a tenth of the trace or so; 40% of requests repeat the one before besides

The last line is JSON. `worst_vs_lru`: of all tempers and cache sizes, the largest mean wait for adapters over LRU's, the geometric mean over seeds;
`vs_lru`: by temper and size. `few_misses_vs_best_fixed`: where half of all is cached, the largest wait over that of any policy that learns
nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.emulated.core.traffic import RANKS
from bench.emulated.table import Bench, Table
from engine_bridge.policy.adapters.adapter_cache import POLICIES, choose_victims
from engine_bridge.policy.adapters.cached_adapter import AdapterEvictionPolicy, CachedAdapter, UseWindow

BYTES_PER_RANK = 2 << 20  # Of a 7B model: q, k, v, o of 32 layers in 16 bits.
CACHE_SHARES, FEW_MISSES_SHARE = (0.05, 0.1, 0.2, 0.5), 0.5
LINK_BYTES_PER_S, OVERHEAD_S = 10e9, 0.002
# Log-normal lengths with the medians and 99th percentiles of Azure's conversation trace, at an A100's pace.
PROMPT, ANSWER = (math.log(1020), 0.6), (math.log(129), 0.85)
PREFILL_TOKENS_PER_S, TPOT_S = 10_000, 0.02


@dataclass(frozen=True, slots=True)
class Use:
    """A request and the adapter it asks for. busy_s: from its adapter's being there to its last token."""

    at_s: float
    adapter_id: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    """sizes: bytes of each adapter, by its id. cache_bytes: of the cache that it meets."""

    uses: Sequence[Use]
    sizes: Sequence[int]
    cache_bytes: int


# -- tempers -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Dealer:
    """The deck that a temper deals adapters from. `sizes` grows where a temper makes adapters up."""

    rng: random.Random
    num: int
    sizes: list[int]
    cache_bytes: int
    num_known: int

    def zipf(self, exponent: float = 1.0, num: int | None = None, among: int | None = None) -> list[int]:
        """Return adapters by a Zipf law over a random order of them."""
        among = among or self.num_known
        order = self.rng.sample(range(among), among)
        weights = [(1 + place) ** -exponent for place in range(among)]
        return self.rng.choices(order, weights, k=self.num if num is None else num)


def stationary(deal: Dealer) -> list[int]:
    """Deal by a law that stays."""
    return deal.zipf(deal.rng.uniform(0.8, 1.2))


def drift(deal: Dealer) -> list[int]:
    """Deal by a Zipf law in which a popular adapter now and then changes places with any other."""
    rng, every = deal.rng, deal.rng.choice((15, 40, 100))
    now_at, found = list(range(deal.num_known)), []
    weights = [1 / (1 + place) for place in range(deal.num_known)]
    for at, place in enumerate(rng.choices(range(deal.num_known), weights, k=deal.num)):
        if at % every == 0:
            old, new = rng.randrange(deal.num_known // 4), rng.randrange(deal.num_known)
            now_at[old], now_at[new] = now_at[new], now_at[old]
        found.append(now_at[place])
    return found


def phases(deal: Dealer) -> list[int]:
    """Deal by a Zipf law that is dealt anew several times."""
    num_phases = deal.rng.choice((3, 5, 8))
    found = [each for _ in range(num_phases) for each in deal.zipf(num=math.ceil(deal.num / num_phases))]
    return found[: deal.num]


def cohorts(deal: Dealer) -> list[int]:
    """Deal a few adapters for a while, then others."""
    rng, num_members, num_each = deal.rng, deal.rng.choice((4, 8, 16)), deal.rng.choice((30, 60, 120))
    found: list[int] = []
    while len(found) < deal.num:
        found += rng.choices(rng.sample(range(deal.num_known), num_members), k=num_each)
    return found[: deal.num]


def scans(deal: Dealer) -> list[int]:
    """Deal by a Zipf law, and now and then half of all adapters once each."""
    every, found = deal.rng.choice((400, 800)), []
    while len(found) < deal.num:
        found += deal.zipf(num=every) + deal.rng.sample(range(deal.num_known), deal.num_known // 2)
    return found[: deal.num]


def loops(deal: Dealer) -> list[int]:
    """Deal the same adapters in one order, a few more than the cache holds."""
    chosen: list[int] = []
    scale = deal.rng.uniform(1.1, 1.5)
    for adapter_id in deal.rng.sample(range(deal.num_known), deal.num_known):
        if len(chosen) > 2 and sum(deal.sizes[a] for a in chosen) >= scale * deal.cache_bytes:
            break
        chosen.append(adapter_id)
    return [chosen[at % len(chosen)] for at in range(deal.num)]


def wonders(deal: Dealer) -> list[int]:
    """Deal four in ten requests an adapter that no other request asks for."""
    found = []
    for adapter_id in deal.zipf(among=deal.num_known // 2):
        if deal.rng.random() < 0.4:
            deal.sizes.append(deal.rng.choice(RANKS) * BYTES_PER_RANK)
            adapter_id = len(deal.sizes) - 1
        found.append(adapter_id)
    return found


def jobs(deal: Dealer) -> list[int]:
    """Deal active adapters, each for a part of the trace; some requests repeat the one before."""
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


TEMPERS: dict[str, Callable[[Dealer], list[int]]] = {
    f.__name__: f for f in (stationary, drift, phases, cohorts, scans, loops, wonders, jobs)
}


def generated(temper: str, seed: int, cache_share: float, num_requests: int) -> Workload:
    """Return the same workload for the same arguments."""
    rng = random.Random(f"{temper} {seed}")
    num_adapters = rng.choice((100, 200, 400))
    own_ranks = RANKS if rng.random() < 2 / 3 else (32,)
    sizes = [rng.choice(own_ranks) * BYTES_PER_RANK for _ in range(num_adapters)]
    cache_bytes = int(cache_share * sum(sizes))
    # A loop is what the cache sees: of requests that hardly overlap.
    scale, rate_per_s = (0.02 if temper == "loops" else rng.choice((0.02, 0.3, 1.0))), rng.choice((2, 6, 12))
    adapter_ids = TEMPERS[temper](Dealer(rng, num_requests, sizes, cache_bytes, num_adapters))
    at_s, uses = 0.0, []
    for adapter_id in adapter_ids:
        at_s += rng.expovariate(rate_per_s)
        prompt, answer = rng.lognormvariate(*PROMPT), rng.lognormvariate(*ANSWER)
        uses.append(Use(at_s, adapter_id, scale * (prompt / PREFILL_TOKENS_PER_S + answer * TPOT_S)))
    return Workload(uses, sizes, cache_bytes)


# -- the cache in virtual time -----------------------------------------------------------------------------------------


def load_s(num_bytes: int) -> float:
    """Return the seconds of a load."""
    return OVERHEAD_S + num_bytes / LINK_BYTES_PER_S


@dataclass(slots=True)
class Device:
    """Slots, the cache, and the link (see the module's docstring). waits_s: of each request, for its adapter. loaded_s: when all loads are done."""

    workload: Workload
    policy: AdapterEvictionPolicy
    window: UseWindow
    waits_s: list[float] = field(default_factory=list)
    loaded_s: float = 0.0
    _cached: dict[int, float] = field(default_factory=dict)  # since when unused
    _num_running: dict[int, int] = field(default_factory=dict)
    _ready_s: dict[int, float] = field(default_factory=dict)
    _ends: list[tuple[float, int]] = field(default_factory=list)

    def replay(self) -> None:
        """Play the whole workload."""
        for use in self.workload.uses:
            while self._ends and self._ends[0][0] <= use.at_s:
                end_s, adapter_id = heapq.heappop(self._ends)
                self._end(adapter_id, end_s)
            self._start(use)

    @property
    def wait_mean_ms(self) -> float:
        """Mean wait for an adapter."""
        return statistics.fmean(self.waits_s) * 1e3

    def _start(self, use: Use) -> None:
        adapter_id, now = use.adapter_id, use.at_s
        num_running = self._num_running.get(adapter_id, 0)
        self.window.used(adapter_id, now)
        self.policy.touched(self._facts(adapter_id, now, now, num_running + 1), now)
        if not num_running and self._cached.pop(adapter_id, None) is None:
            self.loaded_s = max(self.loaded_s, now) + load_s(self.workload.sizes[adapter_id])
            self._ready_s[adapter_id] = self.loaded_s
        wait_s = max(self._ready_s.get(adapter_id, 0.0) - now, 0.0)
        self.waits_s.append(wait_s)
        self._num_running[adapter_id] = num_running + 1
        heapq.heappush(self._ends, (now + wait_s + use.busy_s, adapter_id))

    def _end(self, adapter_id: int, now: float) -> None:
        self._num_running[adapter_id] -= 1
        if self._num_running[adapter_id]:
            return
        self.policy.touched(self._facts(adapter_id, now, now), now)
        self._cached[adapter_id] = now
        over = sum(self.workload.sizes[each] for each in self._cached) - self.workload.cache_bytes
        facts = [self._facts(each, last_used_s, now) for each, last_used_s in self._cached.items()]
        for victim in choose_victims(facts, over, self.policy, now):
            del self._cached[victim]
            self.policy.evicted(victim)

    def _facts(self, adapter_id: int, last_used_s: float, now: float, num_requests: int = 0) -> CachedAdapter:
        num_bytes = self.workload.sizes[adapter_id]
        return CachedAdapter(
            adapter_id=adapter_id,
            num_bytes=num_bytes,
            last_used_s=last_used_s,
            uses=self.window.uses(adapter_id, now),
            reload_s=load_s(num_bytes),
            is_queued=False,
            num_requests=num_requests,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError where the cache is over its size, or holds an adapter that runs."""
        assert sum(self.workload.sizes[each] for each in self._cached) <= self.workload.cache_bytes
        assert not any(self._num_running[each] for each in self._cached)


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """One workload, by its temper and the cache's share of all adapters."""

    temper: str
    cache_share: float
    num_requests: int
    seed: int = 0


def serve(point: Point) -> dict[str, float]:
    """Return the mean wait by each policy, in milliseconds."""
    workload = generated(point.temper, point.seed, point.cache_share, point.num_requests)
    waits_ms = {}
    for name in POLICIES:
        window = UseWindow(max_adapters=len(workload.sizes))
        device = Device(workload, POLICIES[name](), window)
        device.replay()
        device.check_invariants()
        waits_ms[name] = device.wait_mean_ms
    return waits_ms


def over(outcomes: Sequence[dict[str, float]], name: str) -> float:
    """Return the mean wait by the policy that serves over that by another one, the geometric mean over seeds; 1 where neither waits."""
    ratios = [
        found["adaptive"] / found[name] if found[name] else 1.0 + found["adaptive"] for found in outcomes
    ]
    return statistics.geometric_mean(ratios)


def tempers_part(bench: Bench) -> None:
    """Find the mean wait over LRU's by temper and cache size, and the worst of them."""
    points = [Point(*cell, int(bench.size)) for cell in itertools.product(TEMPERS, CACHE_SHARES)]
    bench.play(points)
    means = {point: over(bench.of(point), "lru") for point in points}
    bench.figure(("worst_vs_lru",), [max(means.values())], 1.0, unit="ratio")
    few = [point for point in points if point.cache_share == FEW_MISSES_SHARE]
    fixed = [name for name in POLICIES if name != "adaptive"]
    worst = max(over(bench.of(point), name) for point in few for name in fixed)
    bench.figure(("few_misses_vs_best_fixed",), [worst], 1.05, unit="ratio")
    for point, mean in means.items():
        bench.figure(("vs_lru", f"{point.temper} {point.cache_share:.0%}"), [mean], unit="ratio")


TABLE = Table(
    "emulated-adaptercache",
    "The adapters' cache: mean wait over LRU's",
    serve,
    {"tempers": tempers_part},
    (4000, 4000),
    "two seeds",
    seeds=3,
    first_seed=1000,
)

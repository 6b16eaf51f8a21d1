"""Which eviction policy should the adapter cache have, and does prefetching pay? Traffic of every temper against the live policies, in virtual time.

    python -m bench.sim.adapter_cache [--json] [--part tempers|azure|prefetch] [--temper NAME] [--trace CSV] [--cache-share S] [--seeds N] [--seed N]

What runs: `engine_bridge.policy.adapters.adapter_cache` and `.arrivals`; the cache around them is a model. An adapter that running requests use
lies in a slot,
outside the cache. When its last request ends it enters the cache (Chameleon §4.1), which then gives up what it is over its size by, the
newcomer if that is worth least. A request whose adapter is neither in a slot nor cached waits for one link, first come first served: its bytes
over the bandwidth, plus an overhead. The cache's size is constant, where the engine's grows and shrinks with the KV.

Parts: `tempers` (alone by default), see `adapter_traces` for them and for files to replay (`--trace`, several if given several times; they come
instead of the tempers). The policy's constants were chosen on seeds below 20 of another generator's run; the default ones begin at 1,000.
`azure` and `prefetch`: arrivals and lengths of Azure's conversation trace (2023, CC-BY-4.0, Patel et al., ISCA 2024); without it, Poisson arrivals
and log-normal lengths with its quantiles. Each seed replays another part of the hour, `--span-s` long, and deals other adapters to it: 100, 20 of
each rank 8 … 128, of a 7B model. Which one a request asks for is synthetic:
  ranks     Chameleon §5.1: a power law over ranks, small ones asked for most (its exponent is not given; 1 here), uniform within a rank
  zipf      a Zipf law (exponent 1) over adapters, whatever their rank
  drift     the same, and every 3 minutes 20 of the 25 most asked for change places with others
  timers    half of the requests as in `zipf`, and 30 adapters that timers call instead, every 30 to 300 s, 5% early or late

The last line is JSON (with `--json` the only one, without `runs`). `worst_vs_lru`: of all tempers and cache sizes, the largest mean wait for
adapters over LRU's, the geometric mean over seeds, and `worst_at` which it was; `worst_run_vs_lru` the same of single runs. `stationary_vs_lru`: the
largest of the tempers whose popularity stays. `runs[]`, for each traffic, cache size (`cache_share` of all adapters' bytes) and policy, per seed:
`hit_rate` and `byte_hit_rate` of requests whose adapter is in no slot; `bytes_moved` over the link; `wait_mean_ms` and `wait_p99_ms` for the adapter,
over all requests, of which `in_slot_share` find it in a slot; `prefetched` and `prefetches_used`.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import itertools
import json
import math
import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from bench.data import AZURE, lines_of
from bench.live.report import report
from bench.sim.adapter_policies import Clairvoyant, ExpectedGain, GreedyDual
from bench.sim.adapter_traces import (
    BYTES_PER_RANK,
    RANKS,
    STATIONARY,
    TEMPERS,
    Request,
    Use,
    Workload,
    busy_s,
    dealt,
    drawn_busy_s,
    generated,
    read_uses,
)
from engine_bridge.policy.adapters.adapter_cache import POLICIES, choose_victims
from engine_bridge.policy.adapters.arrivals import Arrivals
from engine_bridge.policy.adapters.cached_adapter import (
    USE_HALF_LIFE_S,
    AdapterEvictionPolicy,
    CachedAdapter,
    UseWindow,
)

ADAPTERS_PER_RANK = 20
NUM_ADAPTERS = len(RANKS) * ADAPTERS_PER_RANK
SIZES = [rank * BYTES_PER_RANK for rank in RANKS for _ in range(ADAPTERS_PER_RANK)]
TEMPER_SHARES, SHARES, PREFETCH_SHARES = (0.05, 0.1, 0.2), (0.05, 0.1, 0.2, 0.4), (0.05, 0.2)
DRIFT_S = 180.0
TIMER_PERIODS_S = (30.0, 300.0)
TIMER_JITTER = 0.05
NUM_TIMERS = 30
LEAD_S = 10.0
"""How far ahead prefetching looks. Chosen: many loads' length, and a narrower window than the histogram's bins from a minute on."""
LIKELY = 0.5
"""From here on what is due is loaded, and kept like what is queued. Measured: with everything that is due at all, waits on `timers` with a cache of
5% became 7% longer instead of 1% shorter."""
STAY_S = USE_HALF_LIFE_S
"""For how long what a prefetch displaces would have stayed. Chosen: it does not come back when the prefetch has been used."""


# -- traffic of the parts `azure` and `prefetch` -------------------------------------------------------------------------


def read_trace(path: Path) -> list[Request]:
    """The trace's requests from its first one on, packed or not."""
    rows = [
        (datetime.fromisoformat(row["TIMESTAMP"][:26]), row) for row in csv.DictReader(lines_of(path))
    ]  # 100 ns are cut off
    start = rows[0][0]
    return [
        Request((at - start).total_seconds(), busy_s(int(row["ContextTokens"]), int(row["GeneratedTokens"])))
        for at, row in rows
    ]


def generate(rng: random.Random, num_requests: int = 19_366, span_s: float = 3502.0) -> list[Request]:
    """The trace's rate, and lengths like its own, for machines that do not have it."""
    times = sorted(rng.uniform(0, span_s) for _ in range(num_requests))
    return [Request(at, drawn_busy_s(rng)) for at in times]


def part_of(requests: Sequence[Request], span_s: float, rng: random.Random) -> list[Request]:
    """A part of the traffic, from a random moment on, that becomes 0."""
    start_s = rng.uniform(0, max(requests[-1].at_s - span_s, 0.0))
    return [Request(r.at_s - start_s, r.busy_s) for r in requests if start_s <= r.at_s < start_s + span_s]


def ranks(requests: Sequence[Request], rng: random.Random) -> list[Use]:
    weights = [1 / (1 + at // ADAPTERS_PER_RANK) for at in range(NUM_ADAPTERS)]
    return dealt(requests, rng.choices(range(NUM_ADAPTERS), weights, k=len(requests)))


def zipf(requests: Sequence[Request], rng: random.Random) -> list[Use]:
    order = rng.sample(range(NUM_ADAPTERS), NUM_ADAPTERS)
    return dealt(requests, [order[place] for place in zipf_places(rng, len(requests), NUM_ADAPTERS)])


def drift(requests: Sequence[Request], rng: random.Random) -> list[Use]:
    order = rng.sample(range(NUM_ADAPTERS), NUM_ADAPTERS)
    changed_s, adapter_ids = 0.0, []
    for request, place in zip(requests, zipf_places(rng, len(requests), NUM_ADAPTERS), strict=True):
        if request.at_s >= changed_s + DRIFT_S:
            changed_s += DRIFT_S
            for old, new in zip(
                rng.sample(range(25), 20), rng.sample(range(25, NUM_ADAPTERS), 20), strict=True
            ):
                order[old], order[new] = order[new], order[old]
        adapter_ids.append(order[place])
    return dealt(requests, adapter_ids)


def timers(requests: Sequence[Request], rng: random.Random) -> list[Use]:
    order = rng.sample(range(NUM_ADAPTERS), NUM_ADAPTERS)
    shared, timed = order[NUM_TIMERS:], order[:NUM_TIMERS]
    kept = [request for request in requests if rng.random() < 0.5]
    uses = dealt(kept, [shared[place] for place in zipf_places(rng, len(kept), len(shared))])
    for adapter_id in timed:
        period_s = rng.uniform(*TIMER_PERIODS_S)
        at_s = rng.uniform(0, period_s)
        while at_s < requests[-1].at_s:
            uses.append(Use(at_s, adapter_id, rng.choice(requests).busy_s))
            at_s += period_s * rng.uniform(1 - TIMER_JITTER, 1 + TIMER_JITTER)
    return sorted(uses, key=lambda use: use.at_s)


def zipf_places(rng: random.Random, num: int, num_places: int) -> list[int]:
    return rng.choices(range(num_places), [1 / (1 + place) for place in range(num_places)], k=num)


TRAFFIC: dict[str, Callable[[Sequence[Request], random.Random], list[Use]]] = {
    "ranks": ranks,
    "zipf": zipf,
    "drift": drift,
    "timers": timers,
}


# -- the cache in virtual time -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Link:
    """Host to device. `free_s`: when the loads that were asked for are done."""

    bytes_per_s: float
    overhead_s: float
    free_s: float = 0.0
    bytes_moved: int = 0

    def takes_s(self, num_bytes: int) -> float:
        return self.overhead_s + num_bytes / self.bytes_per_s

    def load(self, num_bytes: int, now: float) -> float:
        """When a load that is asked for now is done."""
        self.free_s = max(self.free_s, now) + self.takes_s(num_bytes)
        self.bytes_moved += num_bytes
        return self.free_s


class Forecast(Protocol):
    """Who is asked for soon."""

    def arrived(self, adapter_id: int, now: float) -> None: ...
    def due(self, now: float, lead_s: float) -> list[tuple[int, float]]: ...


@dataclass(slots=True)
class Tally:
    waits_s: list[float] = field(default_factory=list)
    num_in_slot: int = 0
    hit_bytes: list[int] = field(default_factory=list)
    miss_bytes: list[int] = field(default_factory=list)
    num_prefetched: int = 0
    num_prefetches_used: int = 0

    def result(self, bytes_moved: int) -> dict[str, float]:
        num_asked = max(len(self.hit_bytes) + len(self.miss_bytes), 1)
        asked_bytes = max(sum(self.hit_bytes) + sum(self.miss_bytes), 1)
        waits_ms = sorted(wait_s * 1e3 for wait_s in self.waits_s)
        return {
            "hit_rate": round(len(self.hit_bytes) / num_asked, 4),
            "byte_hit_rate": round(sum(self.hit_bytes) / asked_bytes, 4),
            "bytes_moved": bytes_moved,
            "wait_mean_ms": round(statistics.fmean(waits_ms), 3),
            "wait_p99_ms": round(waits_ms[int(0.99 * len(waits_ms))], 2),
            "in_slot_share": round(self.num_in_slot / len(waits_ms), 4),
            "prefetched": self.num_prefetched,
            "prefetches_used": self.num_prefetches_used,
        }


class Device:
    """Slots, the cache, and the link (see the module's docstring)."""

    def __init__(
        self,
        workload: Workload,
        policy: AdapterEvictionPolicy,
        link: Link,
        window: UseWindow,
        forecast: Forecast | None = None,
    ) -> None:
        self.tally = Tally()
        self._uses = workload.uses
        self._sizes = workload.sizes
        self._cache_bytes = workload.cache_bytes
        self._policy = policy
        self._link = link
        self._window = window
        self._forecast = forecast
        self._num_running = [0] * len(workload.sizes)
        self._ends: list[tuple[float, int]] = []
        self._cached: dict[int, float] = {}  # since when unused
        self._cached_bytes = 0
        self._ready_s = [0.0] * len(workload.sizes)
        self._prefetched: set[int] = set()  # and not used since
        self._due: dict[int, float] = {}

    def replay(self) -> None:
        for use in self._uses:
            while self._ends and self._ends[0][0] <= use.at_s:
                end_s, adapter_id = heapq.heappop(self._ends)
                self._end(adapter_id, end_s)
            self._start(use)
            if self._forecast is not None:
                self._forecast.arrived(use.adapter_id, use.at_s)
                self._prefetch(self._forecast, use.at_s)

    def _start(self, use: Use) -> None:
        adapter_id, now = use.adapter_id, use.at_s
        self._window.used(adapter_id, now)
        self._policy.touched(self._facts(adapter_id, now, now, self._num_running[adapter_id] + 1), now)
        if self._num_running[adapter_id]:
            self.tally.num_in_slot += 1
        elif adapter_id in self._cached:
            self.tally.hit_bytes.append(self._sizes[adapter_id])
            self.tally.num_prefetches_used += adapter_id in self._prefetched
            self._take_out(adapter_id)
        else:
            self.tally.miss_bytes.append(self._sizes[adapter_id])
            self._ready_s[adapter_id] = self._link.load(self._sizes[adapter_id], now)
        wait_s = max(self._ready_s[adapter_id] - now, 0.0)
        self.tally.waits_s.append(wait_s)
        self._num_running[adapter_id] += 1
        heapq.heappush(self._ends, (now + wait_s + use.busy_s, adapter_id))

    def _end(self, adapter_id: int, now: float) -> None:
        self._num_running[adapter_id] -= 1
        if self._num_running[adapter_id]:
            return
        self._policy.touched(self._facts(adapter_id, now, now), now)
        self._put_in(adapter_id, now)
        over = self._cached_bytes - self._cache_bytes
        for victim in choose_victims(self._all_facts(now), over, self._policy, now):
            self._evict(victim)

    def _put_in(self, adapter_id: int, now: float) -> None:
        self._cached[adapter_id] = now
        self._cached_bytes += self._sizes[adapter_id]

    def _take_out(self, adapter_id: int) -> None:
        del self._cached[adapter_id]
        self._cached_bytes -= self._sizes[adapter_id]
        self._prefetched.discard(adapter_id)

    def _evict(self, adapter_id: int) -> None:
        self._take_out(adapter_id)
        self._policy.evicted(adapter_id)

    def _all_facts(self, now: float) -> list[CachedAdapter]:
        return [self._facts(adapter_id, last_used_s, now) for adapter_id, last_used_s in self._cached.items()]

    def _facts(self, adapter_id: int, last_used_s: float, now: float, num_requests: int = 0) -> CachedAdapter:
        num_bytes = self._sizes[adapter_id]
        return CachedAdapter(
            adapter_id=adapter_id,
            num_bytes=num_bytes,
            last_used_s=last_used_s,
            uses=self._window.uses(adapter_id, now),
            reload_s=self._link.takes_s(num_bytes),
            is_queued=adapter_id in self._due,
            num_requests=num_requests,
        )

    def _prefetch(self, forecast: Forecast, now: float) -> None:
        """Load what is due, if the link is idle and it saves more than what it displaces is likely to cost."""
        if self._link.free_s > now:
            return
        self._due = {a: probability for a, probability in forecast.due(now, LEAD_S) if probability >= LIKELY}
        for adapter_id, probability in self._due.items():
            if self._num_running[adapter_id] or adapter_id in self._cached:
                continue
            victims = self._displaced_by(adapter_id, probability, now)
            if victims is not None:
                for victim in victims:
                    self._evict(victim)
                self._put_in(adapter_id, now)
                self._ready_s[adapter_id] = self._link.load(self._sizes[adapter_id], now)
                self._prefetched.add(adapter_id)
                self.tally.num_prefetched += 1
                return

    def _displaced_by(self, adapter_id: int, probability: float, now: float) -> tuple[int, ...] | None:
        """What would make room for a prefetch; None if it is not worth it."""
        over = self._cached_bytes + self._sizes[adapter_id] - self._cache_bytes
        victims = choose_victims(self._all_facts(now), over, self._policy, now)
        if over > 0 and not victims:
            return None
        lost_s = sum(self._probability(v, now) * self._link.takes_s(self._sizes[v]) for v in victims)
        return victims if probability * self._link.takes_s(self._sizes[adapter_id]) > lost_s else None

    def _probability(self, adapter_id: int, now: float) -> float:
        """That it would be asked for while it stays."""
        by_rate = -math.expm1(-self._window.per_s(adapter_id, now) * STAY_S)
        return self._due.get(adapter_id, by_rate)

    def check_invariants(self) -> None:
        assert (
            self._cached_bytes
            == sum(self._sizes[adapter_id] for adapter_id in self._cached)
            <= self._cache_bytes
        )
        assert not any(self._num_running[adapter_id] for adapter_id in self._cached)


# -- policies and forecasts --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """One policy, and what goes with it."""

    policy: Callable[[Sequence[Use]], AdapterEvictionPolicy]
    forecast: Callable[[], Forecast] | None = None
    half_life_s: float = USE_HALF_LIFE_S


def arm_of(name: str, **parts: Any) -> Arm:
    return Arm(lambda uses: POLICIES[name](), **parts)


BEST = "adaptive"
MAIN = {name: arm_of(name) for name in POLICIES} | {
    "greedy_dual": Arm(lambda uses: GreedyDual()),
    "expected_gain": Arm(lambda uses: ExpectedGain()),
    "expected_gain, 20 s": Arm(lambda uses: ExpectedGain(), half_life_s=20.0),
    "clairvoyant": Arm(Clairvoyant),
}
PREFETCH = {BEST: arm_of(BEST), "+ histogram": arm_of(BEST, forecast=Arrivals)}
# What the acceptance needs, and what is compared with it.
TEMPER_ARMS = {
    name: MAIN[name]
    for name in ("lru", BEST, "greedy_dual", "expected_gain", "expected_gain, 20 s", "clairvoyant")
}
PARTS = {
    "azure": (MAIN, ("ranks", "zipf", "drift"), SHARES),
    "prefetch": (PREFETCH, ("ranks", "timers"), PREFETCH_SHARES),
}


# -- runs --------------------------------------------------------------------------------------------------------------


def measure(arm: Arm, workload: Workload, link: Link) -> dict[str, float]:
    """All figures of one arm on one seed's traffic."""
    forecast = arm.forecast() if arm.forecast else None
    window = UseWindow(arm.half_life_s, max_adapters=len(workload.sizes))
    device = Device(workload, arm.policy(workload.uses), link, window, forecast)
    device.replay()
    device.check_invariants()
    return device.tally.result(link.bytes_moved)


def run_part(part: str, requests: Sequence[Request], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result for each traffic, cache size and arm, all seeds in it."""
    arms, kinds, shares = PARTS[part]
    span_s = args.prefetch_span_s if part == "prefetch" else args.span_s
    rngs = [random.Random(args.seed + repeat) for repeat in range(args.seeds)]
    parts = [part_of(requests, span_s, rng) for rng in rngs]
    for kind in kinds:
        seeds = [TRAFFIC[kind](requests, random.Random(args.seed + i)) for i, requests in enumerate(parts)]
        for share, (name, arm) in itertools.product(shares, arms.items()):
            workloads = [Workload(uses, SIZES, int(share * sum(SIZES))) for uses in seeds]
            runs = [measure(arm, each, Link(args.link_bytes_per_s, args.overhead_s)) for each in workloads]
            yield {"part": part, "traffic": kind, "cache_share": share, "span_s": span_s, "policy": name} | {
                key: [run[key] for run in runs] for key in runs[0]
            }


def run_seed(
    args: argparse.Namespace, traffic: str | Path, share: float, seed: int
) -> dict[str, dict[str, float]]:
    """What each arm makes of one seed's workload."""
    if isinstance(traffic, Path):
        workload = read_uses(traffic, seed, share, args.busy_scale)
    else:
        workload = generated(traffic, seed, share, args.requests)
    return {
        name: measure(arm, workload, Link(args.link_bytes_per_s, args.overhead_s))
        for name, arm in TEMPER_ARMS.items()
    }


def run_tempers(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The same for tempers or files."""
    traffics = args.trace or args.temper or list(TEMPERS)
    seeds = range(args.seed, args.seed + args.seeds)
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        cells = {
            cell: [workers.submit(run_seed, args, *cell, seed) for seed in seeds]
            for cell in itertools.product(traffics, args.cache_share or TEMPER_SHARES)
        }
        for (traffic, share), futures in cells.items():
            runs = [future.result() for future in futures]
            where = {"part": "tempers", "traffic": str(traffic), "cache_share": share}
            for name in TEMPER_ARMS:
                yield {**where, "policy": name} | {
                    key: [run[name][key] for run in runs] for key in runs[0][name]
                }


# -- the report --------------------------------------------------------------------------------------------------------


def verdict(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The acceptance's figures, each policy's waits and bytes over LRU's, and its hit rate."""
    cells: dict[tuple[str, float], dict[str, Any]] = defaultdict(dict)
    for run in runs:
        if run["part"] == "tempers":
            cells[run["traffic"], run["cache_share"]][run["policy"]] = run
    if not cells:
        return {}
    ratios = {cell: over_lru(arms[BEST], arms["lru"], "wait_mean_ms") for cell, arms in cells.items()}
    means = {cell: statistics.geometric_mean(values) for cell, values in ratios.items()}
    worst = max(means, key=lambda cell: means[cell])
    still = [value for (traffic, _), value in means.items() if traffic in STATIONARY]
    by_policy = {
        name: {
            f"{traffic} {share:.0%}": {
                "wait": round(
                    statistics.geometric_mean(over_lru(arms[name], arms["lru"], "wait_mean_ms")), 3
                ),
                "bytes": round(
                    statistics.geometric_mean(over_lru(arms[name], arms["lru"], "bytes_moved")), 3
                ),
                "hit_rate": round(statistics.fmean(arms[name]["hit_rate"]), 3),
            }
            for (traffic, share), arms in cells.items()
        }
        for name in TEMPER_ARMS
    }
    return {
        "worst_vs_lru": round(means[worst], 4),
        "stationary_vs_lru": round(max(still), 4) if still else None,
        "worst_at": f"{worst[0]} {worst[1]:.0%}",
        "worst_run_vs_lru": round(max(itertools.chain.from_iterable(ratios.values())), 4),
        "vs_lru": by_policy,
    }


def over_lru(run: dict[str, Any], lru: dict[str, Any], key: str) -> list[float]:
    """Seed by seed; 1 where neither loses anything."""
    return [own / other if other else 1.0 + own for own, other in zip(run[key], lru[key], strict=True)]


def row_of(run: dict[str, Any]) -> tuple[str, str, str]:
    """One line of the table: medians over seeds, and the range of the mean wait."""
    middle = {key: statistics.median(values) for key, values in run.items() if isinstance(values, list)}
    figures = (
        f"{middle['hit_rate']:6.1%} {middle['byte_hit_rate']:9.1%} {middle['bytes_moved'] / 1e9:8.1f} GB"
    )
    figures += f"{middle['wait_mean_ms']:9.2f}{middle['wait_p99_ms']:7.1f} ms"
    waits = run["wait_mean_ms"]
    used = f"  {middle['prefetches_used']:.0f} of {middle['prefetched']:.0f} prefetches used" * bool(
        middle["prefetched"]
    )
    return (
        f"{run['traffic']:<11}{run['cache_share']:4.0%}  {run['policy']}",
        figures,
        f"  ({min(waits):.2f} … {max(waits):.2f}){used}",
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument("--part", choices=("tempers", *PARTS), action="append", help="tempers by default")
    parser.add_argument("--temper", choices=TEMPERS, action="append", help="all by default")
    parser.add_argument(
        "--trace", type=Path, action="append", help="CSV of time, adapter and, if known, bytes"
    )
    parser.add_argument(
        "--cache-share", type=float, action="append", help="of all adapters' bytes; .05 .1 .2"
    )
    parser.add_argument("--requests", type=int, default=4000, help="of a temper")
    parser.add_argument(
        "--busy-scale", type=float, default=0.3, help="of the times that a file's requests run"
    )
    parser.add_argument("--arrivals", type=Path, default=AZURE, help="of the parts azure and prefetch")
    parser.add_argument("--span-s", type=float, default=600.0, help="of the arrivals, for each seed")
    parser.add_argument(
        "--prefetch-span-s",
        type=float,
        default=2400.0,
        help="the same for prefetching, which takes time to learn",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two seeds")
    parser.add_argument("--seed", type=int, default=1000, help="the first one")
    parser.add_argument("--link-bytes-per-s", type=float, default=10e9)
    parser.add_argument("--overhead-s", type=float, default=0.002, help="of each load")
    args = parser.parse_args()
    args.seeds = min(args.seeds, 2) if args.quick else args.seeds
    return args


def main() -> None:
    args = arguments()
    chosen = args.part or ["tempers"]
    is_recorded = args.arrivals.exists()
    requests = read_trace(args.arrivals) if is_recorded else generate(random.Random(args.seed))
    runs = []
    parts = [run_tempers(args) if part == "tempers" else run_part(part, requests, args) for part in chosen]
    for run in itertools.chain.from_iterable(parts):
        runs.append(run)
        print(*row_of(run), file=sys.stderr, flush=True)
    result = verdict(runs) | {
        "bench": "adapter_cache",
        "arrivals": args.arrivals.name if is_recorded else "generated",
        "seeds": [args.seed + repeat for repeat in range(args.seeds)],
        "link_bytes_per_s": args.link_bytes_per_s,
        "overhead_s": args.overhead_s,
    }
    if args.json:
        print(json.dumps(result))
        return
    result["runs"] = runs
    head = (
        "traffic, cache, policy",
        "   hit  byte hit       moved     mean    p99 wait",
        "  (mean, by seed)",
    )
    report("Adapter cache, replayed in virtual time", [head, *map(row_of, runs)], result)


if __name__ == "__main__":
    main()

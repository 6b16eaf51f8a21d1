"""What cold adapters cost: those who run beside them, those who wait for them, and a machine with a hundred of them.

    python -m bench.live.adapters [--quick]

Engines, each in a process of its own, all alive at once and taking turns, one busy at a time: our node; the peer, which is vLLM's own
handling of adapters (least recently used go first, by count; loading inside steps) on our LoRA wrapper; for `stock_lora_overhead` alone, vLLM
with its own CPU wrapper. Same model (`bench.live.models`), KV blocks and requests; each request has a cache salt of its own, so no prefix is found
again; greedy, float32. Warm-up: two requests per engine. Adapters: 100 PEFT folders on q, k, v, o, ranks 8, 16, 32, 64 and 128, 20 each.

Memory: a fifth of all adapters' bytes in host memory. The peer counts adapters: its `max_cpu_loras` is the largest with which an LRU cache holds
as many bytes on average over the bench's own requests. A step of ours may use 8 adapters; on a CPU our table has two slots more, so the peer
gets 10. Idle KV blocks, in which ours keeps adapters, are there in both.

The last line is JSON.
`stall_ms`: four base streams decode while four cold adapters of rank 64 arrive, a quarter of a second apart (on disk, in no page cache; prompts of 16
tokens); their worst inter-token gap, less the worst one when the same requests find their adapters in slots. Median of the repeats; gaps are taken
at the ends of steps. `stall_ms_no_assist`, `stock_stall_ms`: without CPU-assist, and the peer. `step_ms`: the streams' median inter-token gap.
`cold_ttft_vs_resident_p50`, `_p99`: TTFT of a request alone, prompt of 256 tokens, rank 64, whose adapter lies in host memory and in no slot, over
the same with the adapter in a slot: the median of the repeats' ratios, and 99th percentile over 99th percentile. `cold_ttft`: the same for every
start (`host`; `disk`, in no page cache; with and without CPU-assist; the peer over its own resident start). `noise`: resident over resident, what
this measure says where nothing differs.
`policies`: Poisson arrivals, lengths of Azure's conversation trace (2023) divided by LENGTH_SCALE, adapters by a power law over ranks (1 over the
rank's place) and uniform within; caches warmed by short requests of the same law. `hit_rate`: requests whose adapter was not on disk only when they
came. `bytes_moved`: of weights, from disk; all adapters' files are dropped from the page cache four times a second. TTFT counts from when a
request was due. `requests_per_s`: over the time from the first arrival to the last token. Arrivals are the same for all.
`stall_steps`: `stall_ms` in steps.
`lora_overhead`: tokens/s of 8 requests over 8 adapters (ranks 8, 8, 16, 16, 32, 32, 64, 128) over tokens/s of the same on the base model.
`tokens_identical`: each request of the cold starts got the same tokens from every start and engine.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.intervals import Aim, judged
from bench.live.adapter_law import ANSWER_PERCENTILES, PROMPT_PERCENTILES, Adapters, drawn
from bench.live.adapter_streams import COLD_ARRIVALS, decode_rate, gaps_of, streams_and_arrivals
from bench.live.models import ModelShape
from bench.live.peers.adapters import Ask, forget_files
from bench.live.peers.client import Worker
from bench.live.peers.play import text
from bench.live.report import Progress, figures, options, report, spread
from bench.measures import quantile

STEP_ADAPTERS, SPARE_SLOTS = 8, 2
NUM_KV_BLOCKS, MAX_MODEL_LEN = 256, 2048
COLD_RANK = 64


COLD_PROMPT_TOKENS, COLD_ANSWER_TOKENS = 256, 3

OVERHEAD_RANKS = (8, 8, 16, 16, 32, 32, 64, 128)
OVERHEAD_PROMPT_TOKENS = 16

POLICIES = ("lru", "equal_weights", "chameleon", "adaptive", "peer")
LENGTH_SCALE = 16
FORGET_EVERY_S = 0.25
AIMS = {
    "cold_ttft_vs_resident_p50": "aim ≤ 1.05",
    "cold_ttft_vs_resident_p99": "aim ≤ 1.2",
    "tokens_identical": "aim true",
}
DECIDED = {"stall_steps": Aim(0.5, is_most=True), "lora_overhead": Aim(0.8)}
"""Figures with an interval over their repeats."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured; as it is, by the whole bench. rate_per_s, traffic_s: of the arrivals for each policy, in each repeat."""

    stall_repeats: int = 15
    cold_repeats: int = 60
    traffic_repeats: int = 3
    traffic_s: float = 40
    rate_per_s: float = 3
    warm_up_requests: int = 100
    overhead_repeats: int = 8
    overhead_tokens: int = 128
    stock_overhead_repeats: int = 2
    stock_overhead_tokens: int = 6


QUICK = Plan(
    stall_repeats=8,
    cold_repeats=10,
    traffic_repeats=1,
    traffic_s=10,
    rate_per_s=3,
    warm_up_requests=50,
    overhead_repeats=6,
    overhead_tokens=24,
    stock_overhead_repeats=1,
    stock_overhead_tokens=4,
)


@dataclass(frozen=True)
class Start:
    """A way for a request to find its adapter: on which engine, where, and whether CPU-assist may begin with it (ours only)."""

    kind: str
    place: str
    has_assist: bool = True

    @property
    def name(self) -> str:
        whose = "peer " if self.kind == "peer" else ""
        return f"{whose}{self.place}{'' if self.has_assist else ' no assist'}"

    @property
    def resident(self) -> Start:
        return Start(self.kind, "slot")


COLD_STARTS = (
    Start("ours", "slot"),
    Start("ours", "slot again"),
    Start("ours", "host"),
    Start("ours", "disk"),
    Start("ours", "host", has_assist=False),
    Start("ours", "disk", has_assist=False),
    Start("peer", "slot"),
    Start("peer", "host"),
    Start("peer", "disk"),
)
STALLS = (
    Start("ours", "slot"),
    Start("ours", "disk"),
    Start("ours", "disk", has_assist=False),
    Start("peer", "slot"),
    Start("peer", "disk"),
)


# -- what is asked -----------------------------------------------------------------------------------------------------


def drawn_length(percentiles: dict[int, int], chance: random.Random) -> int:
    """A number of tokens with this distribution, scaled down."""
    return max(round(drawn(percentiles, chance) / LENGTH_SCALE), 2)


def one_of_each(adapters: Adapters) -> list[str]:
    """One adapter for each of OVERHEAD_RANKS."""
    return [adapters.of_rank[rank][number] for number, rank in enumerate(OVERHEAD_RANKS)]


def traffic(plan: Plan, adapters: Adapters, repeat: int) -> tuple[list[Ask], list[Ask]]:
    """(warm-up, what is measured) of one repeat; the same for every policy."""
    chance = random.Random(f"traffic {repeat}")
    warm_up = [
        Ask(
            at_s=0,
            prompt=text(4, "warm", repeat, number),
            max_tokens=1,
            adapter=adapters.drawn(chance),
        )
        for number in range(plan.warm_up_requests)
    ]
    asks: list[Ask] = []
    at_s = chance.expovariate(plan.rate_per_s)
    while at_s < plan.traffic_s:
        asks.append(
            Ask(
                at_s=at_s,
                prompt=text(
                    drawn_length(PROMPT_PERCENTILES, chance),
                    "traffic",
                    repeat,
                    len(asks),
                ),
                max_tokens=drawn_length(ANSWER_PERCENTILES, chance),
                adapter=adapters.drawn(chance),
            )
        )
        at_s += chance.expovariate(plan.rate_per_s)
    return warm_up, asks


def equal_count(plan: Plan, adapters: Adapters) -> int:
    """The largest number of adapters whose bytes in an LRU cache, averaged over the bench's requests, are no more than our host memory."""
    at_least = STEP_ADAPTERS + SPARE_SLOTS
    count = at_least
    while count < len(adapters.folders) and mean_lru_bytes(plan, adapters, count + 1) <= adapters.host_bytes:
        count += 1
    return count


def mean_lru_bytes(plan: Plan, adapters: Adapters, count: int) -> float:
    held_bytes = []
    for repeat in range(plan.traffic_repeats):
        cached: OrderedDict[str, int] = OrderedDict()
        warm_up, asks = traffic(plan, adapters, repeat)
        for number, ask in enumerate((*warm_up, *asks)):
            assert ask.adapter is not None
            cached.pop(ask.adapter, None)
            cached[ask.adapter] = adapters.num_bytes[ask.adapter]
            if len(cached) > count:
                cached.popitem(last=False)
            if number >= len(warm_up):
                held_bytes.append(sum(cached.values()))
    return statistics.mean(held_bytes)


# -- what comes of it --------------------------------------------------------------------------------------------------


def change(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Of an account that counts from the engine's start."""
    found = {place: n - before["found"].get(place, 0) for place, n in after["found"].items()}
    return {
        "found": found,
        "loads": after["loads"] - before["loads"],
        "bytes_moved": after["bytes_moved"] - before["bytes_moved"],
    }


class PolicyResult:
    """Sums up the repeats of one policy's traffic."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.found: dict[str, int] = defaultdict(int)
        self.loads = self.bytes_moved = 0
        self.elapsed_s = 0.0
        self.token_ids: list[list[int]] = []

    def add(self, answers: Sequence[dict[str, Any]], account: dict[str, Any], first_at_s: float) -> None:
        self.ttft_s += [answer["ttft_s"] for answer in answers]
        self.token_ids += [answer["token_ids"] for answer in answers]
        for place, num in account["found"].items():
            self.found[place] += num
        self.loads += account["loads"]
        self.bytes_moved += account["bytes_moved"]
        self.elapsed_s += max(answer["token_s"][-1] for answer in answers) - first_at_s

    def as_dict(self) -> dict[str, Any]:
        total = sum(self.found.values())
        return {
            "hit_rate": round(1 - self.found["disk"] / total, 3),
            "bytes_moved": self.bytes_moved,
            "ttft_p50_s": round(quantile(self.ttft_s, 0.5), 4),
            "ttft_p99_s": round(quantile(self.ttft_s, 0.99), 4),
            "requests_per_s": round(len(self.ttft_s) / self.elapsed_s, 3),
            "num_requests": total,
            "loads": self.loads,
            "found": dict(self.found),
        }


# -- the bench ---------------------------------------------------------------------------------------------------------


class Bench(Progress):
    """One run over live workers."""

    def __init__(self, plan: Plan, adapters: Adapters, workers: dict[str, Worker]) -> None:
        super().__init__()
        self.plan = plan
        self.adapters = adapters
        self.workers = workers
        self.stall_gaps_s: dict[Start, list[list[float]]] = defaultdict(list)
        self.cold_ttft_s: dict[Start, list[float]] = defaultdict(list)
        self.cold_answers: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        self.policies = {name: PolicyResult() for name in POLICIES}
        self.rates: dict[tuple[str, bool], list[float]] = defaultdict(list)

    def play(self, kind: str, asks: Sequence[Ask], **options: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.workers[kind].call(
            "play", requests=[asdict(ask) for ask in asks], **options
        )
        return answers

    def prepare(self, start: Start, names: Sequence[str]) -> None:
        """Put adapters where this start finds them."""
        worker = self.workers[start.kind]
        if start.kind == "ours":
            worker.call("set_assist", is_on=start.has_assist)
        worker.call("put", adapters=list(names), place=start.place.split()[0])

    # -- streams beside cold adapters --------------------------------------------------------------------------------

    def measure_stalls(self) -> None:
        for repeat in range(-1, self.plan.stall_repeats):  # the first one warms up
            chance = random.Random(f"stall {repeat}")
            names = chance.sample(self.adapters.of_rank[COLD_RANK], COLD_ARRIVALS)
            asks = streams_and_arrivals(names, repeat)
            for start in chance.sample(STALLS, len(STALLS)):
                self.prepare(start, names)
                answers = self.play(start.kind, asks)
                if repeat >= 0:
                    self.stall_gaps_s[start].append(gaps_of(answers))
            if repeat < 0:
                continue
            worst = {start.name: f"{max(gaps[-1]) * 1e3:.0f}" for start, gaps in self.stall_gaps_s.items()}
            print(f"  repeat {repeat + 1}: worst gap in ms {worst}", flush=True)

    def stalls_ms(self, start: Start) -> list[float]:
        """By repeat."""
        pairs = zip(self.stall_gaps_s[start], self.stall_gaps_s[start.resident], strict=True)
        return [(max(cold) - max(resident)) * 1e3 for cold, resident in pairs]

    # -- cold starts -------------------------------------------------------------------------------------------------

    def measure_cold(self) -> None:
        for repeat in range(-1, self.plan.cold_repeats):
            chance = random.Random(f"cold {repeat}")
            name = chance.choice(self.adapters.of_rank[COLD_RANK])
            ask = Ask(
                at_s=0.0,
                prompt=text(COLD_PROMPT_TOKENS, "cold", repeat),
                max_tokens=COLD_ANSWER_TOKENS,
                adapter=name,
            )
            for start in chance.sample(COLD_STARTS, len(COLD_STARTS)):
                self.prepare(start, [name])
                answer = self.play(start.kind, [ask])[0]
                if repeat >= 0:
                    self.cold_ttft_s[start].append(answer["ttft_s"])
                    self.cold_answers[repeat].add(tuple(answer["token_ids"]))
        self.workers["ours"].call("set_assist", is_on=True)

    def cold_ratios(self, start: Start) -> dict[str, float]:
        cold, resident = self.cold_ttft_s[start], self.cold_ttft_s[start.resident]
        ratios = [one / other for one, other in zip(cold, resident, strict=True)]
        return {
            "p50": round(statistics.median(ratios), 3),
            "p99": round(quantile(cold, 0.99) / quantile(resident, 0.99), 3),
        }

    # -- a hundred adapters ------------------------------------------------------------------------------------------

    def measure_policies(self) -> None:
        for repeat in range(self.plan.traffic_repeats):
            warm_up, asks = traffic(self.plan, self.adapters, repeat)
            for policy in random.Random(f"order {repeat}").sample(POLICIES, len(POLICIES)):
                kind = "peer" if policy == "peer" else "ours"
                worker = self.workers[kind]
                worker.call("empty", **({} if kind == "peer" else {"policy": policy}))
                with forgotten_files(self.adapters.folders.values()):
                    self.play(kind, warm_up, one_by_one=True)
                    before = worker.call("adapter_account")
                    answers = self.play(kind, asks)
                    account = change(before, worker.call("adapter_account"))
                self.policies[policy].add(answers, account, asks[0].at_s)
                print(f"  [{self.elapsed_s:.0f} s] {policy}: {self.policies[policy].as_dict()}", flush=True)

    def same_share(self) -> float:
        """Of the traffic's requests, those that got the same tokens under every policy. Batches differ, so rounding may."""
        answers = zip(*(result.token_ids for result in self.policies.values()), strict=True)
        same = [all(one == several[0] for one in several) for several in answers]
        return round(statistics.mean(same), 3)

    # -- throughput --------------------------------------------------------------------------------------------------

    def measure_overhead(self, kinds: Sequence[str], repeats: int, num_tokens: int) -> None:
        names = one_of_each(self.adapters)
        for repeat in range(-1, repeats):  # the first one warms up, and brings the adapters into slots
            turns = [(kind, has_adapters) for kind in kinds for has_adapters in (True, False)]
            for kind, has_adapters in random.Random(f"overhead {repeat}").sample(turns, len(turns)):
                asks = [
                    Ask(
                        at_s=0.0,
                        prompt=text(OVERHEAD_PROMPT_TOKENS, "overhead", repeat, number),
                        max_tokens=num_tokens,
                        adapter=name if has_adapters else None,
                    )
                    for number, name in enumerate(names)
                ]
                rate = decode_rate(self.play(kind, asks))
                if repeat >= 0:
                    self.rates[kind, has_adapters].append(rate)

    def overheads(self, kind: str) -> list[float]:
        """Tokens/s with adapters over tokens/s without, by repeat."""
        pairs = zip(self.rates[kind, True], self.rates[kind, False], strict=True)
        return [with_adapters / without for with_adapters, without in pairs]

    def overhead(self, kind: str) -> float | None:
        """The median of `overheads`; None where there are none."""
        found = self.overheads(kind)
        return round(statistics.median(found), 4) if found else None


@contextmanager
def forgotten_files(folders: Any) -> Iterator[None]:
    """Meanwhile, have the page cache forget these adapters again and again: it is memory that nobody accounts for."""
    over = threading.Event()

    def forget() -> None:
        while not over.is_set():
            forget_files(folders)
            over.wait(FORGET_EVERY_S)

    thread = threading.Thread(target=forget)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# -- engines and the report --------------------------------------------------------------------------------------------


def run(plan: Plan, is_quick: bool) -> None:
    shape = ModelShape()
    started_s = time.perf_counter()
    print("adapters on disk …", flush=True)
    adapters = Adapters(shape)
    count = equal_count(plan, adapters)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overture-bench-")))
        settings = adapters.settings(
            folder,
            num_blocks=NUM_KV_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_loras=STEP_ADAPTERS,
            max_cpu_loras=count,
        )
        print(f"[{time.perf_counter() - started_s:.0f} s] starting engines on {shape.name} …", flush=True)
        peer = replace(settings, max_loras=STEP_ADAPTERS + SPARE_SLOTS)
        workers = {
            "ours": stack.enter_context(Worker("adapters_ours", settings, folder)),
            "peer": stack.enter_context(Worker("adapters_peer", peer, folder)),
        }
        described = {kind: worker.wait_ready() for kind, worker in workers.items()}
        print(f"  {described}; max_cpu_loras of the peer {count}", flush=True)
        bench = Bench(plan, adapters, workers)
        bench.started_s = started_s
        stock = replace(settings, max_num_batched_tokens=128)
        measure(bench, lambda: stack.enter_context(Worker("adapters_stock", stock, folder)))
    show(bench, count, is_quick)


def measure(bench: Bench, start_stock: Callable[[], Worker]) -> None:
    plan = bench.plan
    bench.say("streams beside cold adapters")
    bench.measure_stalls()
    bench.say("cold starts")
    bench.measure_cold()
    bench.say("a hundred adapters")
    bench.measure_policies()
    bench.say("throughput with eight adapters")
    bench.measure_overhead(("ours", "peer"), plan.overhead_repeats, plan.overhead_tokens)
    bench.say("throughput with vLLM's own wrapper")
    bench.workers["stock"] = start_stock()
    bench.workers["stock"].wait_ready()
    bench.measure_overhead(("stock",), plan.stock_overhead_repeats, plan.stock_overhead_tokens)


def show(bench: Bench, count: int, is_quick: bool) -> None:
    ours, no_assist, peer = (start for start in STALLS if start.place == "disk")
    cold = {start.name: bench.cold_ratios(start) for start in COLD_STARTS if start.place != "slot"}
    noise = cold.pop("slot again")
    gaps_ms = [gap * 1e3 for gaps in bench.stall_gaps_s[ours.resident] for gap in gaps]
    step_ms = statistics.median(gaps_ms)
    stalls = [stall_ms / step_ms for stall_ms in bench.stalls_ms(ours)]
    decided = judged({"stall_steps": stalls, "lora_overhead": bench.overheads("ours")}, DECIDED)
    result: dict[str, Any] = {
        "stall_ms": round(statistics.median(bench.stalls_ms(ours)), 1),
        "step_ms": round(step_ms, 1),
        "stall_steps": round(statistics.median(stalls), 3),
        "stock_stall_ms": round(statistics.median(bench.stalls_ms(peer)), 1),
        "cold_ttft_vs_resident_p50": cold["host"]["p50"],
        "cold_ttft_vs_resident_p99": cold["host"]["p99"],
        "lora_overhead": bench.overhead("ours"),
        "stock_lora_overhead": bench.overhead("stock"),
        "tokens_identical": all(len(answers) == 1 for answers in bench.cold_answers.values()),
    }
    extra = {
        "policies": {name: found.as_dict() for name, found in bench.policies.items()},
        "stall_ms_no_assist": round(statistics.median(bench.stalls_ms(no_assist)), 1),
        "stall_spread_ms": {
            start.name: [round(stall, 1) for stall in sorted(bench.stalls_ms(start))]
            for start in (ours, no_assist, peer)
        },
        "cold_ttft": cold,
        "noise": noise,
        "peer_lora_overhead": bench.overhead("peer"),
        "policies_same_tokens_share": bench.same_share(),
        "max_cpu_loras": count,
        "host_bytes": bench.adapters.host_bytes,
        "length_scale": LENGTH_SCALE,
        "rate_per_s": bench.plan.rate_per_s,
        "cold_prompt_tokens": COLD_PROMPT_TOKENS,
        "quick": is_quick,
        "elapsed_s": round(bench.elapsed_s),
    }
    said = {
        name: f"{DECIDED[name]}, 95% {decided['intervals'][name]}: {each}"
        for name, each in decided["verdicts"].items()
    }
    report("Adapters", [*rows_of(bench), *figures(result, AIMS | said)], result | decided | extra)


def rows_of(bench: Bench) -> list[tuple[str, str, str]]:
    """What the result is made of."""
    rows = [
        (
            f"worst gap of streams, adapters on {start.name}, ms",
            spread([max(gaps) * 1e3 for gaps in bench.stall_gaps_s[start]]),
            "",
        )
        for start in STALLS
    ]
    rows += [
        (f"stall, {start.name}, ms", spread(bench.stalls_ms(start)), "")
        for start in STALLS
        if start.place == "disk"
    ]
    rows += [
        (
            f"TTFT of {COLD_PROMPT_TOKENS} tokens, adapter in {start.name}, ms",
            spread([ttft_s * 1e3 for ttft_s in bench.cold_ttft_s[start]]),
            "over resident p50 {p50}, p99 {p99}".format(**bench.cold_ratios(start)),
        )
        for start in COLD_STARTS
    ]
    rows += [policy_row(name, found.as_dict()) for name, found in bench.policies.items()]
    rows += [
        (f"tokens/s, {kind}, {'8 adapters' if has_adapters else 'base'}", spread(rates), "")
        for (kind, has_adapters), rates in sorted(bench.rates.items())
        if rates
    ]
    return rows


def policy_row(name: str, found: dict[str, Any]) -> tuple[str, str, str]:
    measured = (
        f"hits {found['hit_rate']:.0%}, {found['bytes_moved'] / 1e6:.0f} MB, "
        f"TTFT p50 {found['ttft_p50_s'] * 1e3:.0f}, p99 {found['ttft_p99_s'] * 1e3:.0f} ms, {found['requests_per_s']:.2f}/s"
    )
    return f"{found['num_requests']} requests, {name}", measured, ""


def main() -> None:
    is_quick = options(__doc__, quick="within five minutes").parse_args().quick
    run(QUICK if is_quick else Plan(), is_quick)


if __name__ == "__main__":
    main()

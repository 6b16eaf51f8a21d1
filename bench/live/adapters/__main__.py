"""What cold adapters cost: those who run beside them, those who wait for them, and a machine with a hundred of them.

    python -m bench.live.adapters [--quick]

Engines, each in a process of its own, both alive at once and taking turns, one busy at a time: our node; the peer, which is vLLM's own
handling of adapters (least recently used go first, by count; loading inside steps) on our LoRA wrapper. Same model
(`bench.live.shared.models`), KV blocks and requests; no play finds the KV of another one; greedy, float32. Warm-up: two requests per engine.
Adapters: 100 PEFT folders on q, k, v, o, ranks 8, 16, 32, 64 and 128, 20 each.

Memory: a fifth of all adapters' bytes in host memory. The peer counts adapters: it may hold PEER_HOST_ADAPTERS. A step of ours may use 8 adapters; on
a CPU our table has two slots more, so the peer gets 10. Idle KV blocks, in which ours keeps adapters, are there in both.

The last line is JSON.
`stall_ms`: four base streams decode while four cold adapters of rank 64 arrive, a quarter of a second apart (on disk, in no page cache; prompts of 16
tokens); their worst inter-token gap, less the worst one when the same requests find their adapters in slots. Median of the repeats; gaps are taken
at the ends of steps. `stock_stall_ms`: the peer. `step_ms`: the streams' median inter-token gap. `stall_steps`: `stall_ms` in steps.
`cold_ttft_vs_resident_p50`, `_p99`: TTFT of a request alone to ours, prompt of 256 tokens, rank 64, whose adapter lies in host memory and in no slot,
over the same with the adapter in a slot: the median of the repeats' ratios, and 99th percentile over 99th percentile.
`policies`, `adaptive` ours and `peer`: Poisson arrivals, lengths of Azure's conversation trace (2023) divided by LENGTH_SCALE, adapters by a power
law over ranks (1 over the rank's place) and uniform within; caches warmed by short requests of the same law. `hit_rate`: requests whose adapter was
not on disk only when they came. All adapters' files are dropped from the page cache four times a second. TTFT counts from when a request was due.
Arrivals are the same for both.
`lora_overhead`: tokens/s of 8 requests over 8 adapters (ranks 8, 8, 16, 16, 32, 32, 64, 128) over tokens/s of the same on the base model.
`tokens_identical`: each request of the cold starts got the same tokens from both starts.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.intervals import Aim, judged
from bench.live.peers.engine import forget_files
from bench.live.peers.play import Answer, Ask, decode_rate, text
from bench.live.peers.worker import Worker, start_workers
from bench.live.shared.models import ModelShape
from bench.live.shared.report import Progress, figures, options, report, spread, spread_ms
from bench.live.shared.traffic import Adapters, Traffic
from bench.measures import quantile

STEP_ADAPTERS, SPARE_SLOTS = 8, 2
NUM_KV_BLOCKS, MAX_MODEL_LEN = 256, 2048
# The adapters that an LRU cache holds in the bytes of our host memory, on average over such requests.
PEER_HOST_ADAPTERS = 31
COLD_RANK, COLD_PROMPT_TOKENS, COLD_ANSWER_TOKENS = 64, 256, 3
STREAMS, STREAM_PROMPT_TOKENS, STREAM_TOKENS = 4, 32, 1000
COLD_ARRIVALS, FIRST_ARRIVAL_S, ARRIVAL_GAP_S, ARRIVAL_PROMPT_TOKENS, ARRIVAL_TOKENS = 4, 0.6, 0.25, 16, 4
OVERHEAD_RANKS, OVERHEAD_PROMPT_TOKENS = (8, 8, 16, 16, 32, 32, 64, 128), 16
POLICIES = {"adaptive": "ours", "peer": "peer"}
"""The engine of each way to keep adapters."""
LENGTH_SCALE = 16
FORGET_EVERY_S = 0.25
AIMS = {
    "cold_ttft_vs_resident_p50": "aim ≤ 1.05",
    "cold_ttft_vs_resident_p99": "aim ≤ 1.2",
    "tokens_identical": "aim true",
}
DECIDED = {"stall_steps": Aim(0.5, is_most=True), "lora_overhead": Aim(0.8)}
"""Figures with an interval over their repeats."""
STALL_STARTS = [(kind, place) for kind in ("ours", "peer") for place in ("slot", "disk")]
COLD_STARTS = [("ours", "slot"), ("ours", "host")]
"""How a request finds its adapter: on which engine, and where."""


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


QUICK = Plan(
    stall_repeats=8,
    cold_repeats=10,
    traffic_repeats=1,
    traffic_s=10,
    warm_up_requests=50,
    overhead_repeats=6,
    overhead_tokens=24,
)


# -- the requests ------------------------------------------------------------------------------------------------------


def streams_and_arrivals(names: Sequence[str], repeat: int) -> list[Ask]:
    """Base streams from the start until all is over, and one request for each adapter."""
    streams = [
        Ask(
            prompt=text(STREAM_PROMPT_TOKENS, "stream", repeat, number),
            max_tokens=STREAM_TOKENS,
            is_background=True,
        )
        for number in range(STREAMS)
    ]
    arrivals = [
        Ask(
            at_s=FIRST_ARRIVAL_S + number * ARRIVAL_GAP_S,
            prompt=text(ARRIVAL_PROMPT_TOKENS, "arrival", repeat, number),
            max_tokens=ARRIVAL_TOKENS,
            adapter=name,
        )
        for number, name in enumerate(names)
    ]
    return streams + arrivals


def gaps_of(answers: Sequence[Answer]) -> list[float]:
    """The base streams' inter-token gaps, in seconds, from the first arrival to the last arrival's end."""
    end_s = max(answer.token_s[-1] for answer in answers[STREAMS:])
    return [
        after - before
        for answer in answers[:STREAMS]
        for before, after in pairwise(answer.token_s)
        if after >= FIRST_ARRIVAL_S and before <= end_s
    ]


# -- the bench ---------------------------------------------------------------------------------------------------------


@dataclass
class PolicyResult:
    """Results of the repeats of one policy's traffic. found: number of requests by the place of their adapter when they came."""

    ttft_s: list[float] = field(default_factory=list)
    found: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Return the policy's figures."""
        return {
            "hit_rate": round(1 - self.found["disk"] / self.found.total(), 3),
            "ttft_p50_s": round(quantile(self.ttft_s, 0.5), 4),
            "ttft_p99_s": round(quantile(self.ttft_s, 0.99), 4),
            "num_requests": self.found.total(),
            "found": dict(self.found),
        }


class Bench(Progress):
    """One run over live workers.

    Attributes:
        gaps_s: gaps of streams by engine and place of the cold adapters, by repeat.
        cold_ttft_s: TTFTs by engine and place, by repeat; cold_answers: the different answers by repeat.
        policies: what came of the traffic by policy.
        rates: tokens per second of ours with adapters (True) and without, by repeat.
    """

    def __init__(self, plan: Plan, adapters: Adapters, workers: dict[str, Worker]) -> None:
        super().__init__()
        self.plan = plan
        self.adapters = adapters
        self.workers = workers
        self.gaps_s: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
        self.cold_ttft_s: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.cold_answers: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        self.policies = {name: PolicyResult() for name in POLICIES}
        self.rates: dict[bool, list[float]] = {True: [], False: []}

    def play_cold(
        self, names: Sequence[str], asks: Sequence[Ask], starts: Sequence[tuple[str, str]], repeat: int
    ) -> Iterator[tuple[tuple[str, str], list[Answer]]]:
        """Play requests for these adapters from each start, in a random order; yield the answers, but those of the repeat -1, which warms up."""
        for kind, place in random.Random(f"order {repeat}").sample(starts, len(starts)):
            self.workers[kind].call("put", adapters=list(names), place=place)
            answers = self.workers[kind].play(asks)
            if repeat >= 0:
                yield (kind, place), answers

    def measure_stalls(self) -> None:
        """Measure the gaps of streams beside arriving requests with cold adapters."""
        for repeat in range(-1, self.plan.stall_repeats):
            names = random.Random(f"stall {repeat}").sample(self.adapters.of_rank[COLD_RANK], COLD_ARRIVALS)
            asks = streams_and_arrivals(names, repeat)
            for start, answers in self.play_cold(names, asks, STALL_STARTS, repeat):
                self.gaps_s[start].append(gaps_of(answers))
        self.say(f"worst gaps in ms {[row[:2] for row in self.stall_rows()]}")

    def stalls_ms(self, kind: str) -> list[float]:
        """Return by how many ms the worst gap is longer than with resident adapters, by repeat."""
        pairs = zip(self.gaps_s[kind, "disk"], self.gaps_s[kind, "slot"], strict=True)
        return [(max(cold) - max(resident)) * 1e3 for cold, resident in pairs]

    def stall_rows(self) -> list[tuple[str, str, str]]:
        """Return the rows of the table."""
        return [
            (f"worst gap of streams, {kind}, adapters in {place}, ms", spread_ms(map(max, found)), "")
            for (kind, place), found in sorted(self.gaps_s.items())
        ]

    def measure_cold(self) -> None:
        """Measure the TTFT of single requests by the place of their adapter."""
        for repeat in range(-1, self.plan.cold_repeats):
            name = random.Random(f"cold {repeat}").choice(self.adapters.of_rank[COLD_RANK])
            prompt = text(COLD_PROMPT_TOKENS, "cold", repeat)
            asks = [Ask(prompt=prompt, max_tokens=COLD_ANSWER_TOKENS, adapter=name)]
            for start, (answer,) in self.play_cold([name], asks, COLD_STARTS, repeat):
                self.cold_ttft_s[start].append(answer.ttft_s)
                self.cold_answers[repeat].add(tuple(answer.token_ids))

    def cold_ratios(self) -> dict[str, float]:
        """Return the median of the cold start's TTFT over the resident one's, and the ratio of their P99."""
        resident, cold = (self.cold_ttft_s[start] for start in COLD_STARTS)
        ratios = [one / other for one, other in zip(cold, resident, strict=True)]
        return {
            "cold_ttft_vs_resident_p50": round(statistics.median(ratios), 3),
            "cold_ttft_vs_resident_p99": round(quantile(cold, 0.99) / quantile(resident, 0.99), 3),
        }

    def measure_policies(self) -> None:
        """Play the same requests under every policy."""
        plan, traffic = self.plan, Traffic(self.adapters, LENGTH_SCALE)
        for repeat in range(plan.traffic_repeats):
            warm_up = traffic.warm_up(plan.warm_up_requests, repeat)
            asks = traffic.asks(plan.rate_per_s, plan.traffic_s, repeat)
            for policy in random.Random(f"order {repeat}").sample(list(POLICIES), len(POLICIES)):
                worker, result = self.workers[POLICIES[policy]], self.policies[policy]
                worker.call("empty")
                with forgotten_files(self.adapters.folders.values()):
                    worker.play(warm_up, one_by_one=True)
                    before = worker.call("found")
                    answers = worker.play(asks)
                    result.found += Counter(worker.call("found")) - Counter(before)
                result.ttft_s += [answer.ttft_s for answer in answers]
                self.say(f"{policy}: {result.as_dict()}")

    def measure_overhead(self) -> None:
        """Measure our tokens per second with adapters and without."""
        names = [self.adapters.of_rank[rank][number] for number, rank in enumerate(OVERHEAD_RANKS)]
        for repeat in range(-1, self.plan.overhead_repeats):  # the first one brings the adapters into slots
            for has_adapters in random.Random(f"overhead {repeat}").sample((True, False), 2):
                asks = [
                    Ask(
                        prompt=text(OVERHEAD_PROMPT_TOKENS, "overhead", repeat, number),
                        max_tokens=self.plan.overhead_tokens,
                        adapter=name if has_adapters else None,
                    )
                    for number, name in enumerate(names)
                ]
                rate = decode_rate(self.workers["ours"].play(asks))
                if repeat >= 0:
                    self.rates[has_adapters].append(rate)


@contextmanager
def forgotten_files(folders: Iterable[str]) -> Iterator[None]:
    """Have the page cache forget these adapters again and again until the block ends: its memory counts for no engine."""
    over = threading.Event()

    def forget() -> None:
        """Forget the files every FORGET_EVERY_S."""
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
    """Start the engines, measure everything and report."""
    adapters = Adapters(ModelShape())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overture-bench-")))
        settings = adapters.settings(
            folder,
            num_blocks=NUM_KV_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_loras=STEP_ADAPTERS,
            max_cpu_loras=PEER_HOST_ADAPTERS,
            scheduling_policy="vllm",
        )
        peer = replace(settings, max_loras=STEP_ADAPTERS + SPARE_SLOTS)
        workers = start_workers({"ours": ("ours", settings), "peer": ("stock", peer)}, folder, stack)
        bench = Bench(plan, adapters, workers)
        bench.say("streams beside cold adapters")
        bench.measure_stalls()
        bench.say("cold starts")
        bench.measure_cold()
        bench.say("a hundred adapters")
        bench.measure_policies()
        bench.say("throughput with eight adapters")
        bench.measure_overhead()
    show(bench, is_quick)


def show(bench: Bench, is_quick: bool) -> None:
    """Print the report."""
    step_ms = statistics.median(gap * 1e3 for gaps in bench.gaps_s["ours", "slot"] for gap in gaps)
    stalls_ms = bench.stalls_ms("ours")
    by_repeat = {
        "stall_steps": [stall_ms / step_ms for stall_ms in stalls_ms],
        "lora_overhead": [rate / base for rate, base in zip(*bench.rates.values(), strict=True)],
    }
    decided = judged(by_repeat, DECIDED)
    result: dict[str, Any] = {
        "stall_ms": round(statistics.median(stalls_ms), 1),
        "step_ms": round(step_ms, 1),
        "stall_steps": round(statistics.median(by_repeat["stall_steps"]), 3),
        "stock_stall_ms": round(statistics.median(bench.stalls_ms("peer")), 1),
        **bench.cold_ratios(),
        "lora_overhead": round(statistics.median(by_repeat["lora_overhead"]), 4),
        "tokens_identical": all(len(answers) == 1 for answers in bench.cold_answers.values()),
    }
    extra = {
        "policies": {name: found.as_dict() for name, found in bench.policies.items()},
        "max_cpu_loras": PEER_HOST_ADAPTERS,
        "host_bytes": bench.adapters.host_bytes,
        "quick": is_quick,
        "elapsed_s": round(bench.elapsed_s),
    }
    rows = bench.stall_rows() + [
        (f"TTFT of {COLD_PROMPT_TOKENS} tokens, adapter in {place}, ms", spread_ms(found), "")
        for (_, place), found in bench.cold_ttft_s.items()
    ]
    rows += [(f"traffic, {name}", str(found), "") for name, found in extra["policies"].items()]
    rows += [
        (f"tokens/s, {'8 adapters' if has_adapters else 'base'}", spread(rates), "")
        for has_adapters, rates in bench.rates.items()
    ]
    said = {
        name: f"{DECIDED[name]}, 95% {decided['intervals'][name]}: {each}"
        for name, each in decided["verdicts"].items()
    }
    report("Adapters", [*rows, *figures(result, AIMS | said)], result | decided | extra)


def main() -> None:
    """Run the bench from the command line."""
    is_quick = options(__doc__, quick="within five minutes").parse_args().quick
    run(QUICK if is_quick else Plan(), is_quick)


if __name__ == "__main__":
    main()

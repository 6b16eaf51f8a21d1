"""What advisories are worth where KV comes from the disk: long conversations, host memory for a tenth of them, and others at work all the while.

    python -m bench.live.advisory --source disk [--quick]

Two of our nodes, each in a process of its own, take turns. One has device memory for a fifth and host memory for a tenth of the conversations; on
the other, the oracle, the device holds all of them (it gets them from the first one's files, which are linked into its folder). The model is
made on the spot: 16 KiB of KV a token, contexts of 4,096 to 16,384 tokens, and little else to compute. Two streams of others decode all the time.

People read an answer and type a question (`bench.live.people`); an advisory goes out when they begin to type. Questions that were being typed when
a round began are asked, too, but not counted: their typing is cut short. Arms on our node, in random order in each round and each from the same
histories: `ours` with advisories, `none` without. Before each, device and host memory are emptied and the files
leave the page cache; while it runs, the page cache forgets each part as soon as it was read (posix_fadvise, DONTNEED), so that every read is the
disk's: `reads_from_disk` are the bytes that the kernel has fetched from storage for each byte that the tiers have read.

The last line is JSON. `ttft_vs_without_p50`, `_p99`: TTFT of follow-ups with advisories over that without; `vs_oracle_p50`: over the oracle's.
`decode_lost`: share of the streams' tokens a second that advisories cost, against no advisories. `confidence`: of each of these, the interval in
which it lies at 95% (rounds drawn anew), and whether it is `reached`, `missed` or `undecided`. `outcomes`: how advisories ended.
`vs_oracle_bound`: the oracle's tokens a second over those without advisories. Reading from the disk makes steps slower by so much, a first token's
among them: `vs_oracle_p50` would be that if all KV were in its place in time.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.intervals import Aim, interval, quantile_ratio, quantile_ratio_interval, verdict
from bench.live.models import ModelShape, model_folder
from bench.live.peers.client import Worker
from bench.live.peers.engine import Settings
from bench.live.people import Times, times_of
from bench.live.report import Progress, figures, report, spread
from bench.measures import quantile
from kvtiers.io.files import LOCK_NAME

SHAPE = ModelShape(
    num_layers=8, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=4, max_model_len=17408
)
FEWEST_TOKENS, MOST_TOKENS = 4096, 16384
ANSWER_WORDS = 100  # which people read; the engines write its first tokens only, so that TTFT is what counts
NEW_TOKENS, ANSWER_TOKENS = 32, 8
DEVICE_SHARE, HOST_SHARE = 1 / 5, 1 / 10
NUM_STREAMS = 2
BLOCK_SIZE = 32
ARMS = ("oracle", "ours", "none")
AIMS = {
    "ttft_vs_without_p50": Aim(0.6, is_most=True),
    "ttft_vs_without_p99": Aim(0.6, is_most=True),
    "vs_oracle_p50": Aim(1.15, is_most=True),
    "decode_lost": Aim(0.02, is_most=True),
}


def histories_of(num_people: int) -> dict[str, int]:
    """How long each person's conversation is at first, in tokens; their logarithms are spread evenly."""
    ratio = MOST_TOKENS / FEWEST_TOKENS
    lengths = [int(FEWEST_TOKENS * ratio ** (n / (num_people - 1))) for n in range(num_people)]
    random.Random(0).shuffle(lengths)
    return {f"person{n}": length for n, length in enumerate(lengths)}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured; as it is, by the whole bench. end_s: no round begins after it would end later than this; three are always played."""

    num_people: int = 24
    round_s: float = 30
    rounds: int = 20
    end_s: float = 3000


QUICK = Plan(num_people=20, round_s=30, rounds=10, end_s=1080)


@dataclass
class Measured:
    """Of one arm, by round."""

    ttft_s: list[list[float]] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    tier_bytes: int = 0
    disk_bytes: int = 0
    accounts: list[dict[str, Any]] = field(default_factory=list)

    def add(self, played: dict[str, Any], times: Sequence[Times], accounts: list[dict[str, Any]]) -> None:
        self.ttft_s.append([item["ttft_s"] for item in counted(played["asked"], times)])
        self.tokens_per_s.append(played["decode_tokens_per_s"])
        self.gaps_s += played["gaps_s"]
        self.tier_bytes += played["tier_bytes"]
        self.disk_bytes += played["disk_bytes"]
        self.accounts += accounts

    @property
    def all_ttft_s(self) -> list[float]:
        return [ttft_s for each in self.ttft_s for ttft_s in each]


def counted(asked: Sequence[dict[str, Any]], times: Sequence[Times]) -> list[dict[str, Any]]:
    """Without the questions that were being typed when the round began. asked: each person's in their order."""
    cut, kept = {each.session for each in times if each.is_cut}, []
    for item in asked:
        if item["session"] in cut:
            cut.remove(item["session"])
        else:
            kept.append(item)
    return kept


class Bench(Progress):
    """One run over live workers."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.histories = histories_of(plan.num_people)
        self.measured = {arm: Measured() for arm in ARMS}

    @property
    def num_blocks(self) -> int:
        """Of all conversations as they begin."""
        return sum(length // BLOCK_SIZE + 1 for length in self.histories.values())

    def start(self, kind: str, folder: Path, stack: ExitStack) -> Worker:
        """`ours` or the `oracle`, up and with all conversations begun."""
        own = folder / kind
        own.mkdir(exist_ok=True)
        # Room for the longest context, for the streams, and on the oracle for the questions of a round.
        least = (MOST_TOKENS + 512) // BLOCK_SIZE
        num_blocks = max(int(self.num_blocks * (DEVICE_SHARE if kind == "ours" else 1.2)), least)
        block_bytes = BLOCK_SIZE * SHAPE.kv_token_bytes
        settings = Settings(
            model=str(model_folder(SHAPE)),
            dtype=SHAPE.dtype,
            folder=str(own),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MOST_TOKENS + 512,
            host_gib=self.num_blocks * block_bytes * HOST_SHARE / 2**30,
        )
        worker = stack.enter_context(Worker("ours_disk", settings, folder, name=kind))
        worker.wait_ready()
        self.say(f"{kind}: {len(self.histories)} conversations, {num_blocks} blocks on the device")
        worker.call("begin", histories=self.histories)
        worker.call("settle")
        return worker

    def play(self, workers: Mapping[str, Worker]) -> None:
        """All rounds for which there is time."""
        lasting_s: list[float] = []
        for number in range(self.plan.rounds):
            if number >= 3 and self.elapsed_s + max(lasting_s) > self.plan.end_s:
                break
            started_s = time.perf_counter()
            for arm in random.Random(number).sample(ARMS, len(ARMS)):
                self.play_arm(arm, workers["oracle" if arm == "oracle" else "ours"], number)
            lasting_s.append(time.perf_counter() - started_s)
            medians = {
                arm: f"{statistics.median(found.all_ttft_s) * 1e3:.0f}"
                for arm, found in self.measured.items()
            }
            self.say(f"round {number + 1}: median TTFT in ms so far {medians}")

    def play_arm(self, arm: str, worker: Worker, number: int) -> None:
        if arm == "oracle":
            worker.call("hold")
        else:
            worker.call("place", source="disk_cold")
        times = times_of(list(self.histories), ANSWER_WORDS, self.plan.round_s, number)
        played = worker.call(
            "people_beside",
            num_streams=NUM_STREAMS,
            plan=script(times, is_advised=arm == "ours"),
            new_tokens=NEW_TOKENS,
            max_tokens=ANSWER_TOKENS,
            # What one arm asked is on disk when the next one asks: each has its own questions.
            seed=f"{number} {arm}",
        )
        self.measured[arm].add(played, times, worker.call("accounts"))


def script(times: Sequence[Times], *, is_advised: bool) -> list[dict[str, Any]]:
    """A round as a worker takes it."""
    return [
        {
            "session": each.session,
            "asks_s": each.asks_s,
            "leads_s": each.leads_s if is_advised else [None] * len(each.leads_s),
            "wrong": [[]] * len(each.asks_s),
        }
        for each in times
    ]


def run_disk(is_quick: bool) -> None:
    """Measure and report."""
    bench = Bench(QUICK if is_quick else Plan())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overture-bench-")))
        workers = {"ours": bench.start("ours", folder, stack)}
        link_kv(folder / "ours", folder / "oracle")
        workers["oracle"] = bench.start("oracle", folder, stack)
        bench.play(workers)
        bench.say("done")
    show(bench.measured)


def link_kv(source: Path, target: Path) -> None:
    """Give another store the files of one, which appends to none that it has ended, under the same names."""
    for path in source.rglob("*"):
        if path.is_file() and path.name != LOCK_NAME and ".sqlite3" not in path.name:
            linked = target / path.relative_to(source)
            linked.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, linked)


def show(measured: Mapping[str, Measured]) -> None:
    ours, none, oracle = measured["ours"], measured["none"], measured["oracle"]
    lost = [1 - with_ / without for with_, without in zip(ours.tokens_per_s, none.tokens_per_s, strict=True)]
    compared = {
        "ttft_vs_without_p50": (none, 0.5),
        "ttft_vs_without_p99": (none, 0.99),
        "vs_oracle_p50": (oracle, 0.5),
    }
    result: dict[str, Any] = {
        name: round(quantile_ratio(ours.ttft_s, other.ttft_s, share), 3)
        for name, (other, share) in compared.items()
    }
    intervals = {
        name: quantile_ratio_interval(ours.ttft_s, other.ttft_s, share)
        for name, (other, share) in compared.items()
    }
    result["decode_lost"], intervals["decode_lost"] = round(statistics.median(lost), 4), interval(lost)
    slowed = [fast / slow for fast, slow in zip(oracle.tokens_per_s, none.tokens_per_s, strict=True)]
    verdicts = {name: verdict(found, AIMS[name]) for name, found in intervals.items()}
    rows = [
        (
            f"TTFT of follow-ups, {arm}, ms",
            spread([ttft_s * 1e3 for ttft_s in found.all_ttft_s]),
            f"p99 {quantile(found.all_ttft_s, 0.99) * 1e3:.0f}; {spread(found.tokens_per_s)} tokens/s beside",
        )
        for arm, found in measured.items()
    ]
    rows += figures(result, {name: f"{aim}: {verdicts[name]}" for name, aim in AIMS.items()})
    extra = {
        "vs_oracle_bound": round(statistics.median(slowed), 3),
        "confidence": {"intervals": intervals, "verdicts": verdicts},
        "num_rounds": len(lost),
        "num_followups": {arm: len(found.all_ttft_s) for arm, found in measured.items()},
        "ttft_p50_ms": by_arm(measured, lambda found: quantile(found.all_ttft_s, 0.5) * 1e3),
        "ttft_p99_ms": by_arm(measured, lambda found: quantile(found.all_ttft_s, 0.99) * 1e3),
        "decode_tokens_per_s": by_arm(measured, lambda found: statistics.median(found.tokens_per_s)),
        "decode_gap_p99_ms": by_arm(measured, lambda found: quantile(found.gaps_s, 0.99) * 1e3),
        "reads_from_disk": round(none.disk_bytes / max(none.tier_bytes, 1), 2),
        "outcomes": dict(Counter(account["state"] for account in ours.accounts)),
        "page_cache": "posix_fadvise(DONTNEED)",
    }
    report("Advisories, from disk", rows, result | extra)


def by_arm(measured: Mapping[str, Measured], of: Callable[[Measured], float]) -> dict[str, float]:
    return {arm: round(of(found), 1) for arm, found in measured.items()}

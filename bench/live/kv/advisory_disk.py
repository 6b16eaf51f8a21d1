"""What advisories are worth where KV comes from the disk: long conversations, host memory for a tenth of them, and others at work all the while.

    python -m bench.live.kv.advisory --source disk

Our node, in a process of its own, has device memory for a fifth and host memory for a tenth of the conversations. The model is made on the spot:
16 KiB of KV a token, contexts of 4,096 to 16,384 tokens, and little else to compute. Two streams of others decode all the time.

People read an answer and type a question (`bench.live.kv.people`); an advisory goes out when they begin to type. Questions that were being typed when
a round began are asked, too, but not counted: their typing is cut short. Arms, in random order in each round and each from the same histories: `ours`
with advisories, `none` without. Before each, device and host memory are emptied and the files leave the page cache; while it runs, the page cache
forgets each part as soon as it was read (posix_fadvise, DONTNEED), so that every read is the disk's: `reads_from_disk` are the bytes that the kernel
has fetched from storage for each byte that the tiers have read.

The last line is JSON. `ttft_vs_without_p50`, `_p99`: TTFT of follow-ups with advisories over that without. `decode_lost`: share of the streams'
tokens a second that advisories cost, against no advisories. `intervals`: of each of these, the interval in which it lies at 95% (rounds drawn anew);
`verdicts`: whether it is `reached`, `missed` or `undecided`.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from bench.intervals import Aim, interval, quantile_ratio, quantile_ratio_interval, verdict
from bench.live.kv.people import Times, script, times_of
from bench.live.peers.engine import Settings
from bench.live.peers.worker import Worker, start_workers
from bench.live.shared.models import ModelShape
from bench.live.shared.report import Progress, figures, report, spread, spread_ms
from bench.measures import quantile

SHAPE = ModelShape(
    num_layers=8, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=4, max_model_len=17408
)
FEWEST_TOKENS, MOST_TOKENS = 4096, 16384
ANSWER_WORDS = 100  # which people read; the engines write its first tokens only, so that TTFT is what counts
NEW_TOKENS, ANSWER_TOKENS = 32, 8
DEVICE_SHARE, HOST_SHARE = 1 / 5, 1 / 10
NUM_STREAMS = 2
BLOCK_SIZE = 32
ARMS = ("ours", "none")
NUM_PEOPLE, ROUND_S, NUM_ROUNDS = 20, 30.0, 10
# No round begins after it would end later than this; three are always played.
END_S = 1080.0
AIMS = {
    "ttft_vs_without_p50": Aim(0.6, is_most=True),
    "ttft_vs_without_p99": Aim(0.6, is_most=True),
    "decode_lost": Aim(0.02, is_most=True),
}


def first_lengths(shortest: int) -> dict[str, int]:
    """Return the tokens of each person's conversation at first: the longest has four times the shortest, their logarithms are spread evenly."""
    ratio = MOST_TOKENS / FEWEST_TOKENS
    lengths = [int(shortest * ratio ** (n / (NUM_PEOPLE - 1))) for n in range(NUM_PEOPLE)]
    random.Random(0).shuffle(lengths)
    return {f"person{n}": length for n, length in enumerate(lengths)}


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
    """One run over a live worker.

    Attributes:
        ttft_s: TTFTs of each round by arm.
        tokens_per_s: the streams' rates by round.
        reads: bytes read by the tiers and by the disk itself, in rounds without advisories.
    """

    def __init__(self) -> None:
        super().__init__()
        self.histories = first_lengths(FEWEST_TOKENS)
        self.ttft_s: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
        self.tokens_per_s: dict[str, list[float]] = {arm: [] for arm in ARMS}
        self.reads = Counter[str]()

    def start(self, folder: Path, stack: ExitStack) -> Worker:
        """Return our node, up and with all conversations begun."""
        num_blocks = sum(length // BLOCK_SIZE + 1 for length in self.histories.values())
        block_bytes = BLOCK_SIZE * SHAPE.kv_token_bytes
        settings = Settings.of(
            SHAPE,
            folder,
            # Room for the longest context and for the streams.
            num_blocks=max(int(num_blocks * DEVICE_SHARE), (MOST_TOKENS + 512) // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_model_len=MOST_TOKENS + 512,
            host_gib=num_blocks * block_bytes * HOST_SHARE / 2**30,
        )
        worker = start_workers({"ours": ("ours_disk", settings)}, folder, stack)["ours"]
        self.say(f"{len(self.histories)} conversations, {settings.num_blocks} blocks on the device")
        worker.call("begin", histories=self.histories)
        worker.call("settle")
        return worker

    def play(self, worker: Worker) -> None:
        """Play as many rounds as the time allows."""
        lasting_s: list[float] = []
        for number in range(NUM_ROUNDS):
            if number >= 3 and self.elapsed_s + max(lasting_s) > END_S:
                break
            started_s = self.elapsed_s
            for arm in random.Random(number).sample(ARMS, len(ARMS)):
                self.play_arm(arm, worker, number)
            lasting_s.append(self.elapsed_s - started_s)
            self.say(
                f"round {number + 1}: median TTFT in s so far { {arm: spread(self.all_s(arm)) for arm in ARMS} }"
            )

    def play_arm(self, arm: str, worker: Worker, number: int) -> None:
        """Play one arm of one round."""
        worker.call("place", source="disk_cold")
        times = times_of(list(self.histories), ANSWER_WORDS, ROUND_S, number)
        played = worker.call(
            "people_beside",
            num_streams=NUM_STREAMS,
            plan=script(times, lambda: arm == "ours"),
            new_tokens=NEW_TOKENS,
            max_tokens=ANSWER_TOKENS,
            # What one arm asked is on disk when the next one asks: each has its own questions.
            seed=f"{number} {arm}",
        )
        self.ttft_s[arm].append([item["ttft_s"] for item in counted(played["asked"], times)])
        self.tokens_per_s[arm].append(played["decode_tokens_per_s"])
        if arm == "none":
            self.reads.update(tiers=played["tier_bytes"], disk=played["disk_bytes"])

    def all_s(self, arm: str) -> list[float]:
        """TTFTs of an arm's rounds."""
        return list(chain(*self.ttft_s[arm]))


def run_disk() -> None:
    """Measure and report."""
    bench = Bench()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overture-bench-")))
        bench.play(bench.start(folder, stack))
    show(bench)


def show(bench: Bench) -> None:
    """Print the report."""
    ours, none = bench.ttft_s["ours"], bench.ttft_s["none"]
    rates = zip(bench.tokens_per_s["ours"], bench.tokens_per_s["none"], strict=True)
    lost = [1 - with_ / without for with_, without in rates]
    result, intervals = {"decode_lost": round(statistics.median(lost), 4)}, {"decode_lost": interval(lost)}
    for name, share in {"ttft_vs_without_p50": 0.5, "ttft_vs_without_p99": 0.99}.items():
        result[name] = round(quantile_ratio(ours, none, share), 3)
        intervals[name] = quantile_ratio_interval(ours, none, share)
    verdicts = {name: verdict(found, AIMS[name]) for name, found in intervals.items()}
    rows = [
        (
            f"TTFT of follow-ups, {arm}, ms",
            spread_ms(bench.all_s(arm)),
            f"p99 {quantile(bench.all_s(arm), 0.99) * 1e3:.0f}; {spread(bench.tokens_per_s[arm])} tokens/s beside",
        )
        for arm in ARMS
    ]
    rows += figures(result, {name: f"{aim}: {verdicts[name]}" for name, aim in AIMS.items()})
    extra = {
        "intervals": intervals,
        "verdicts": verdicts,
        "num_rounds": len(lost),
        "num_followups": {arm: len(bench.all_s(arm)) for arm in ARMS},
        "reads_from_disk": round(bench.reads["disk"] / max(bench.reads["tiers"], 1), 2),
    }
    report("Advisories, from disk", rows, result | extra)

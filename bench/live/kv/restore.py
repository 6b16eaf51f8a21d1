"""What a follow-up turn waits for, by where its history's KV is; and what the KV tiers cost and hold.

    python -m bench.live.kv.restore [--quick]

Engines, each in a process of its own, all alive at once and taking turns: vLLM (prefix cache, statistics off), and our node with and without its KV
tiers. All have the same model (`bench.live.shared.models`), the same number of KV blocks on the device and no LoRA. Workloads are seeded.
Warm-up: a short turn per engine; histories go up in length, and medians of three or more hide what else is first. Before a history is
restored, the device's KV memory is overwritten.

The last line is JSON. `ttft_s[tokens][source]`: medians, ours; of vLLM under `peers.stock`. `host_copy_efficiency`: our host-to-device copy over the
machine's memcpy. `write_behind_overhead`: decode throughput lost to the tiers. `sessions_held_ratio`: how many sessions of 2,048 tokens, asked in
turn, keep the 90th percentile of their follow-ups' TTFT within twice the device-resident one; ours over stock vLLM's. `tokens_identical`: greedy
answers are the same from every source. Where stock vLLM's own prefix hit and its own recomputation differ (rounding: chunks of another shape),
recomputed answers are left out of the comparison, and `num_ambiguous_turns` counts these turns.
"""

from __future__ import annotations

import signal
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.intervals import Aim, judged
from bench.live.peers.play import FIRST_TEXT_TOKEN, Ask, decode_rate, text
from bench.live.peers.worker import Worker, alike
from bench.live.shared.models import ModelShape
from bench.live.shared.report import Progress, figures, options, report, spread, spread_ms
from bench.live.shared.rounds import in_turn
from bench.measures import quantile

# Without tiers we are stock vLLM: only the throughput of decoding is compared.
SOURCES = {"stock": ("recompute", "device"), "ours": ("recompute", "disk_cold", "disk", "host", "device")}
HISTORY_TOKENS = (512, 1024, 2048, 4096)
NEW_TURN_TOKENS = 32
ANSWER_TOKENS = 4  # TTFT is the first one's; the others only show that the KV is right
SESSION_TOKENS = 2048
# Two sessions of 2,048 tokens, 64 blocks each, or one of 4,096; no third one fits.
NUM_DEVICE_BLOCKS = 150
MAX_MODEL_LEN = 4608
HELD_WITHIN = 2.0
HELD_QUANTILE = 0.9
DECODE_STREAMS, DECODE_PROMPT_TOKENS = 16, 64
DECIDED = {"host_copy_efficiency": Aim(0.8), "write_behind_overhead": Aim(0.03, is_most=True)}
"""Figures with an interval over their repeats."""
AIMS = {"sessions_held_ratio": "aim ≥ 8", "tokens_identical": "aim true"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured; as it is, by the whole bench. `held`: session counts that are tried in turn until one is too many."""

    repeats: int = 5
    copy_repeats: int = 15
    """Of copies, which take milliseconds."""
    own_recompute_repeats: int = 3
    """Of our own recomputation: stock vLLM's is what we compare with."""
    decode_repeats: int = 15
    decode_tokens: int = 160
    held_rounds: int = 2
    held_stock: tuple[int, ...] = (1, 2, 3)
    held_ours: tuple[int, ...] = (16, 32, 48)


QUICK = Plan(
    repeats=3,
    own_recompute_repeats=1,
    decode_repeats=5,
    decode_tokens=64,
    held_rounds=1,
    held_stock=(2, 3),
    held_ours=(16,),
)


def history_of(num_tokens: int) -> list[int]:
    """The history of this length; no two share a prefix."""
    return text(num_tokens, "history", num_tokens)


def first_turn(history: list[int]) -> list[int]:
    """A prompt that leaves exactly `history` in whole blocks: a turn's last token has no KV yet."""
    return [*history, FIRST_TEXT_TOKEN]


def follow_up(history: list[int], *seed: object) -> list[int]:
    """The history, its last token and a new turn."""
    return first_turn(history) + text(NEW_TURN_TOKENS - 1, "turn", *seed)


class Bench(Progress):
    """The running engines, and the measurements on them.

    Attributes:
        ttft_s: times to the first token by engine, source and history length.
        answers: token ids by history length and repeat, then by engine and source.
    """

    def __init__(self, plan: Plan, workers: dict[str, Worker]) -> None:
        super().__init__()
        self.plan = plan
        self.workers = workers
        self.ttft_s: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        self.answers: dict[tuple[int, int], dict[tuple[str, str], list[int]]] = defaultdict(dict)

    def measure_turns(self) -> None:
        """Measure follow-up turns of both engines from all sources."""
        for num_tokens in HISTORY_TOKENS:
            history = history_of(num_tokens)
            for repeat in range(self.plan.repeats):
                for kind in in_turn(list(SOURCES), repeat):
                    self._one_of_each(kind, history, repeat)
            medians = {
                f"{kind} {source}": f"{statistics.median(times) * 1e3:.0f}"
                for (kind, source, length), times in self.ttft_s.items()
                if length == num_tokens
            }
            self.say(f"{num_tokens} tokens, median TTFT in ms: {medians}")

    def _one_of_each(self, kind: str, history: list[int], repeat: int) -> None:
        """One follow-up from each source. `device` comes last and so finds what the one before it brought back."""
        worker, prompt = self.workers[kind], follow_up(history, repeat)
        for source in SOURCES[kind]:
            if source == "recompute" and kind == "ours" and repeat >= self.plan.own_recompute_repeats:
                continue
            worker.call("place", source=source)
            result = worker.call("turn", tokens=prompt, max_tokens=ANSWER_TOKENS)
            worker.call("settle")
            self.ttft_s[kind, source, len(history)].append(result["ttft_s"])
            self.answers[len(history), repeat][kind, source] = result["token_ids"]

    def measure_host_copy(self) -> list[float]:
        """Our host-to-device copy over memcpy, both measured in our engine's process in turn."""
        ours = self.workers["ours"]
        tokens = first_turn(history_of(HISTORY_TOKENS[-1]))
        ours.call("turn", tokens=tokens, max_tokens=1)  # the tiers forgot it when it was last computed again
        ratios = []
        for _ in range(self.plan.copy_repeats):
            ours.call("place", source="host")
            memcpy = ours.call("memcpy")
            copied = ours.call("host_copy", tokens=tokens)
            ratios.append(copied["bytes"] / copied["seconds"] / memcpy)
        return ratios

    def measure_decode(self) -> dict[str, list[float]]:
        """Tokens per second while `DECODE_STREAMS` answers run, with and without tiers."""
        rates: dict[str, list[float]] = {"ours": [], "ours_off": []}
        for repeat in range(-1, self.plan.decode_repeats):  # the first round warms up
            for kind in in_turn(list(rates), repeat):
                worker = self.workers[kind]
                prompts = [text(DECODE_PROMPT_TOKENS, "decode", repeat, n) for n in range(DECODE_STREAMS)]
                asks = [Ask(prompt=prompt, max_tokens=self.plan.decode_tokens) for prompt in prompts]
                answers = worker.call("together", asks=asks)
                if repeat >= 0:
                    rates[kind].append(decode_rate(answers))
                worker.call("settle")
        return rates

    def measure_held(self, kind: str, counts: Sequence[int], limit_s: float) -> dict[str, Any]:
        """The largest of `counts` whose sessions, asked in turn, stay within `limit_s`; stops at the first that do not."""
        worker = self.workers[kind]
        sessions: list[list[int]] = []
        tried: dict[int, float] = {}
        for count in counts:
            for number in range(len(sessions), count):
                sessions.append(text(SESSION_TOKENS, "session", number))
                worker.call("turn", tokens=first_turn(sessions[-1]), max_tokens=1)
            worker.call("settle")
            times = [
                worker.call("turn", tokens=follow_up(session, count, turn), max_tokens=1)["ttft_s"]
                for turn in range(self.plan.held_rounds)
                for session in sessions
            ]
            tried[count] = quantile(times, HELD_QUANTILE)
            self.say(f"{kind}, {count} sessions: p90 {tried[count]:.3f} s, limit {limit_s:.3f} s")
            if tried[count] > limit_s:
                break
        held = max((count for count, p90_s in tried.items() if p90_s <= limit_s), default=0)
        return {"held": held, "p90_s": {str(count): round(value, 4) for count, value in tried.items()}}

    def by_source(self, kind: str) -> dict[str, dict[str, float]]:
        """Median TTFT in seconds by history length and source."""
        found: dict[str, dict[str, float]] = defaultdict(dict)
        for (engine, source, num_tokens), times in self.ttft_s.items():
            if engine == kind:
                found[str(num_tokens)][source] = round(statistics.median(times), 4)
        return found


Answers = Mapping[tuple[int, int], Mapping[tuple[str, str], list[int]]]
"""Token ids by history length and repeat, then by engine and source."""


def compare_answers(turns: Answers) -> dict[str, Any]:
    """Compare the answers to the same prompts. Recomputed ones are left out where stock vLLM disagrees with itself."""
    wrong: list[str] = []
    num_ambiguous = 0
    for (num_tokens, repeat), answers in turns.items():
        reference = answers["stock", "device"]
        is_ambiguous = answers["stock", "recompute"] != reference
        num_ambiguous += is_ambiguous
        for (kind, source), answer in answers.items():
            if answer != reference and not (source == "recompute" and is_ambiguous):
                wrong.append(f"{kind} {source} {num_tokens} #{repeat}")
    return {"tokens_identical": not wrong, "different": wrong, "num_ambiguous_turns": num_ambiguous}


def bench(plan: Plan) -> None:
    """Start the engines, measure everything and report."""
    memory = {"num_blocks": NUM_DEVICE_BLOCKS, "max_model_len": MAX_MODEL_LEN}
    with alike(("stock", "ours", "ours_off"), ModelShape(), **memory) as workers:
        measured = Bench(plan, workers)
        measured.say("follow-up turns")
        measured.measure_turns()
        measured.say("copies, then decoding")
        copies, rates = measured.measure_host_copy(), measured.measure_decode()
        measured.say("sessions held")
        limit_s = HELD_WITHIN * statistics.median(measured.ttft_s["stock", "device", SESSION_TOKENS])
        held = {
            kind: measured.measure_held(kind, counts, limit_s)
            for kind, counts in {"stock": plan.held_stock, "ours": plan.held_ours}.items()
        }
    losses = [1 - on / off for on, off in zip(rates["ours"], rates["ours_off"], strict=True)]
    show(measured, {"host_copy_efficiency": copies, "write_behind_overhead": losses}, rates, held)


def show(
    measured: Bench, repeats: dict[str, list[float]], rates: dict[str, list[float]], held: dict[str, Any]
) -> None:
    """Print the report."""
    decided = judged(repeats, DECIDED)
    result = {name: round(statistics.median(values), 4) for name, values in repeats.items()}
    rows = [
        (f"TTFT after {num_tokens} tokens, {kind}, {source}, ms", spread_ms(times), "")
        for (kind, source, num_tokens), times in measured.ttft_s.items()
    ]
    rows += [
        (f"decode, {DECODE_STREAMS} streams, {kind}, tokens/s", spread(values), "")
        for kind, values in rates.items()
    ]
    rows += [
        (name, f"{spread(repeats[name])}, 95%: {decided['intervals'][name]}", f"{DECIDED[name]}: {said}")
        for name, said in decided["verdicts"].items()
    ]
    found: dict[str, Any] = {"sessions_held_ratio": held["ours"]["held"] / max(held["stock"]["held"], 1)}
    found |= compare_answers(measured.answers)
    rows += figures(found, AIMS)
    result |= found | decided
    result |= {
        "ttft_s": measured.by_source("ours"),
        "peers": {"stock": {"ttft_s": measured.by_source("stock")}},
        "sessions_held": held,
        "num_device_blocks": NUM_DEVICE_BLOCKS,
        "is_quick": measured.plan is QUICK,
    }
    report("restore", rows, result)


def main() -> None:
    """Run the bench from the command line."""
    parser = options(__doc__, quick="fewer repeats and sessions, within 5 minutes")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines and files are cleared away
    bench(QUICK if parser.parse_args().quick else Plan())


if __name__ == "__main__":
    main()

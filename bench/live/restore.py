"""What a follow-up turn waits for, by where its history's KV is; and what the KV tiers cost and hold.

    python -m bench.live.restore [--quick] [--lmcache-python PATH] [--only stock,example]

Engines, each in a process of its own, all alive at once and taking turns: vLLM (prefix cache, statistics off), vLLM's ExampleConnector (disk),
LMCache's multi-process connector (host; where `--lmcache-python` or $LMCACHE_PYTHON names an interpreter that has it), our node with and without
its KV tiers. All have the same model (`bench.live.models`), the same number of KV blocks on the device and no LoRA. Workloads are seeded.
Warm-up: a short turn per engine; histories go up in length, and medians of three or more hide what else is first. Before a history is
restored, the device's KV memory is overwritten.

The last line is JSON. `ttft_s[tokens][source]`: medians, ours. `restore_vs_recompute[tokens][source]`: stock vLLM's recompute over our TTFT.
`host_copy_efficiency`: our host-to-device copy over the machine's memcpy. `disk_read_efficiency`: our read over a plain sequential read of the same
files, from the disk; `disk_read_efficiency_warm`: the same from the page cache, where checking the checksums is what remains. `overlap_gain`: TTFT
with a blocking load over TTFT with a layer-wise one, disk slowed until loading takes as long as computing (2 would be perfect).
`write_behind_overhead`: decode throughput lost to the tiers. `sessions_held_ratio`: how many sessions of 2,048 tokens, asked in turn, keep the 90th
percentile of their follow-ups' TTFT within twice the device-resident one; ours over stock vLLM's. `tokens_identical`: greedy answers are the same
from every source. Where stock vLLM's own prefix hit and its own recomputation differ (rounding: chunks of another shape), recomputed answers are left
out of the comparison, and `num_ambiguous_turns` counts these turns.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.intervals import Aim, judged
from bench.live.models import ModelShape, model_folder
from bench.live.peers.client import Worker, WorkerFailed
from bench.live.peers.engine import Settings
from bench.live.peers.play import text
from bench.live.report import Progress, options, report, spread
from bench.live.restore_turns import (
    HISTORY_TOKENS,
    Turns,
    by_source,
    compare_answers,
    first_turn,
    follow_up,
    history_of,
    restore_ratios,
    turn_rows,
)
from bench.measures import quantile

KINDS = ("stock", "example", "lmcache", "ours", "ours_off")
TURN_KINDS = KINDS[:-1]  # without tiers we are stock vLLM: only the throughput of decoding is compared
ANSWER_TOKENS = 4  # TTFT is the first one's; the others only show that the KV is right
SESSION_TOKENS = 2048
# Two sessions of 2,048 tokens, 64 blocks each, or one of 4,096; no third one fits.
NUM_DEVICE_BLOCKS = 150
MAX_MODEL_LEN = 4608
HELD_WITHIN = 2.0
HELD_QUANTILE = 0.9
DECODE_STREAMS, DECODE_PROMPT_TOKENS = 16, 64
OVERLAP_HISTORY_TOKENS, OVERLAP_NEW_TOKENS = 1024, 512
PLAIN_READ_BYTES = 4 << 20
LMCACHE_PORT = 57655
RESULTS = (
    "ttft_s",
    "restore_vs_recompute",
    "host_copy_efficiency",
    "disk_read_efficiency",
    "overlap_gain",
    "write_behind_overhead",
    "sessions_held_ratio",
)
"""Keys of the result; those that were not measured are null."""
AIMS = {
    "sessions_held_ratio": "aim ≥ 8",
    "tokens_identical": "aim true",
}
DECIDED = {
    "host_copy_efficiency": Aim(0.8),
    "disk_read_efficiency": Aim(0.8),
    "write_behind_overhead": Aim(0.03, is_most=True),
}
"""Figures with an interval over their repeats."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured; as it is, by the whole bench. `held`: session counts that are tried in turn until one is too many."""

    repeats: int = 5
    copy_repeats: int = 15
    """Of copies and reads, which take milliseconds."""
    own_recompute_repeats: int = 3
    """Of our own recomputation: stock vLLM's is what we compare with."""
    decode_repeats: int = 15
    decode_tokens: int = 160
    held_rounds: int = 2
    held_stock: tuple[int, ...] = (1, 2, 3)
    held_peers: tuple[int, ...] = (8, 16)
    held_ours: tuple[int, ...] = (16, 32, 48)


QUICK = Plan(
    repeats=3,
    own_recompute_repeats=1,
    decode_repeats=5,
    decode_tokens=64,
    held_rounds=1,
    held_stock=(2, 3),
    held_peers=(),
    held_ours=(16,),
)


# -- engines -----------------------------------------------------------------------------------------------------------


class Bench(Progress):
    """The running workers, and what is measured on them."""

    def __init__(
        self, plan: Plan, workers: dict[str, Worker], described: dict[str, Any], kv_token_bytes: int
    ) -> None:
        super().__init__()
        self.plan = plan
        self.kv_token_bytes = kv_token_bytes
        self.workers = workers
        self.described = described
        self.skipped: dict[str, str] = {}

    def having(self, *kinds: str) -> list[tuple[str, Worker]]:
        return [(kind, self.workers[kind]) for kind in kinds if kind in self.workers]

    def _in_turn(self, number: int, kinds: Iterable[str] = KINDS) -> Iterator[tuple[str, Worker]]:
        """The workers in an order that alternates with each repeat: a drift of the machine hits all alike."""
        yield from self.having(*kinds)[:: -1 if number % 2 else 1]

    def skip(self, what: str, error: Exception) -> None:
        reason = str(error).splitlines()[0]
        self.skipped[what] = reason
        print(f"  skipped {what}: {reason}", flush=True)

    # -- TTFT --------------------------------------------------------------------------------------------------------

    def measure_turns(self) -> Turns:
        turns = Turns()
        for num_tokens in HISTORY_TOKENS:
            history = history_of(num_tokens)
            for kind, worker in self._in_turn(0, TURN_KINDS):
                # Where the first source is to compute it all, that also puts it into every tier.
                if self.described[kind]["sources"][0] != "recompute":
                    worker.call("turn", tokens=first_turn(history), max_tokens=1)
                    worker.call("settle")
            for repeat in range(self.plan.repeats):
                for kind, worker in self._in_turn(repeat, TURN_KINDS):
                    self._one_of_each(turns, kind, worker, history, repeat)
            print(f"  {num_tokens} tokens: " + self._line(turns, num_tokens), flush=True)
        return turns

    def _one_of_each(self, turns: Turns, kind: str, worker: Worker, history: list[int], repeat: int) -> None:
        """One follow-up from each source. `device` comes last and so finds what the one before it brought back."""
        prompt = follow_up(history, repeat)
        for source in self.described[kind]["sources"]:
            if source == "recompute" and kind != "stock" and repeat >= self.plan.own_recompute_repeats:
                continue
            worker.call("place", source=source)
            result = worker.call("turn", tokens=prompt, max_tokens=ANSWER_TOKENS)
            worker.call("settle")
            key = (kind, source, len(history))
            turns.ttft_s.setdefault(key, []).append(result["ttft_s"])
            turns.num_cached.setdefault(key, []).append(result["num_cached_tokens"])
            turns.answers.setdefault((len(history), repeat), {})[kind, source] = result["token_ids"]

    def _line(self, turns: Turns, num_tokens: int) -> str:
        cells = (
            f"{kind} {source} {statistics.median(times) * 1e3:.0f}"
            for (kind, source, length), times in turns.ttft_s.items()
            if length == num_tokens
        )
        return ", ".join(cells) + " ms"

    # -- throughput of copies and reads ------------------------------------------------------------------------------

    def measure_memcpy(self) -> float:
        """Bytes per second of this machine's plain memory copies."""
        worker = next(iter(self.workers.values()))
        return statistics.median(worker.call("memcpy", repeats=self.plan.repeats + 2))

    def _stored_history(self, ours: Worker) -> list[int]:
        """The longest history, in every tier: whatever recomputed last has emptied them."""
        history = history_of(HISTORY_TOKENS[-1])
        ours.call("turn", tokens=first_turn(history), max_tokens=1)
        return history

    def measure_host_copy(self) -> list[float]:
        """Our host-to-device copy over memcpy, both measured in our engine's process in turn."""
        ours = self.workers["ours"]
        history = self._stored_history(ours)
        ratios = []
        for _ in range(self.plan.copy_repeats):
            ours.call("place", source="host")
            memcpy = ours.call("memcpy", repeats=1)[0]
            copied = ours.call("host_copy", tokens=first_turn(history))
            ratios.append(copied["bytes"] / copied["seconds"] / memcpy)
        return ratios

    def measure_disk_read(self, is_cold: bool) -> list[float]:
        """Our read from disk over a plain sequential read of the same files, in turn."""
        ours = self.workers["ours"]
        history = self._stored_history(ours)
        ratios = []
        for repeat in range(self.plan.copy_repeats):
            rates = {}
            # Whatever lies below the page cache also remembers: who reads first changes with each repeat.
            for who in ("ours", "plain")[:: -1 if repeat % 2 else 1]:
                ours.call("place", source="disk_cold" if is_cold else "disk")
                if who == "ours":
                    read = ours.call("disk_read", tokens=first_turn(history))
                    rates[who] = read["bytes"] / read["seconds"]
                else:
                    num_bytes = len(history) * self.kv_token_bytes
                    rates[who] = plain_read_rate(ours.call("kv_files"), num_bytes)
            ratios.append(rates["ours"] / rates["plain"])
        return ratios

    # -- overlap -----------------------------------------------------------------------------------------------------

    def measure_overlap(self) -> dict[str, Any]:
        """TTFT with blocking and with layer-wise loads, in turn, from a disk on which loading takes as long as computing."""
        ours = self.workers["ours"]
        history = history_of(OVERLAP_HISTORY_TOKENS)
        ours.call("place", source="device")
        ours.call("turn", tokens=first_turn(history), max_tokens=1)
        computing_s = statistics.median(
            ours.call(
                "turn", tokens=follow_up(history, "compute", n, num_tokens=OVERLAP_NEW_TOKENS), max_tokens=1
            )["ttft_s"]
            for n in range(self.plan.repeats)
        )
        times: dict[bool, list[float]] = {True: [], False: []}
        answers: dict[bool, list[list[int]]] = {True: [], False: []}
        ours.call("slow_disk", bytes_per_s=len(history) * self.kv_token_bytes / computing_s)
        try:
            for repeat in range(self.plan.repeats):
                for is_layerwise in (True, False)[:: -1 if repeat % 2 else 1]:
                    ours.call("layerwise", is_on=is_layerwise)
                    ours.call("place", source="disk")
                    prompt = follow_up(history, "overlap", repeat, num_tokens=OVERLAP_NEW_TOKENS)
                    result = ours.call("turn", tokens=prompt, max_tokens=ANSWER_TOKENS)
                    times[is_layerwise].append(result["ttft_s"])
                    answers[is_layerwise].append(result["token_ids"])
                    ours.call("settle")
        finally:
            ours.call("layerwise", is_on=True)
            ours.call("slow_disk", bytes_per_s=None)
        return {
            "computing_s": computing_s,
            "layerwise_s": times[True],
            "blocking_s": times[False],
            "is_same_answer": answers[True] == answers[False],
        }

    # -- decode ------------------------------------------------------------------------------------------------------

    def measure_decode(self) -> dict[str, list[float]]:
        """Tokens per second while `DECODE_STREAMS` answers run, with and without tiers."""
        rates: dict[str, list[float]] = {}
        for repeat in range(-1, self.plan.decode_repeats):  # the first round warms up
            for kind, worker in self._in_turn(repeat, ("ours", "ours_off")):
                prompts = [text(DECODE_PROMPT_TOKENS, "decode", repeat, n) for n in range(DECODE_STREAMS)]
                result = worker.call("batch", prompts=prompts, max_tokens=self.plan.decode_tokens)
                if repeat >= 0:
                    rates.setdefault(kind, []).append(result["decode_tokens_per_s"])
                worker.call("settle")
        return rates

    # -- sessions held -----------------------------------------------------------------------------------------------

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
            is_held = tried[count] <= limit_s
            print(
                f"  {kind}, {count} sessions: median {statistics.median(times) * 1e3:.0f}, "
                f"p90 {tried[count] * 1e3:.0f} ms, limit {limit_s * 1e3:.0f}{'' if is_held else ': too many'}",
                flush=True,
            )
            if not is_held:
                break
        held = max((count for count, p90_s in tried.items() if p90_s <= limit_s), default=0)
        return {"held": held, "p90_s": {str(count): round(value, 4) for count, value in tried.items()}}


def plain_read_rate(files: Sequence[str], num_bytes: int) -> float:
    """Bytes per second of reading `num_bytes` of the files, one after another from their beginning, into memory that is there."""
    memory = memoryview(bytearray(num_bytes))
    for start in range(0, num_bytes, 4096):
        memory[start] = 1  # else the first touch of each page would count
    total = 0
    started_s = time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while total < num_bytes and (count := file.readinto(memory[total : total + PLAIN_READ_BYTES])):
                total += count
    return total / (time.perf_counter() - started_s)


def start_workers(
    kinds: Sequence[str], shape: ModelShape, folder: Path, lmcache_python: str | None, stack: ExitStack
) -> tuple[dict[str, Worker], dict[str, Any], dict[str, str]]:
    """Start all engines together. Returns those that came up, what they say of themselves, and why others did not."""
    model = model_folder(shape)
    started: dict[str, Worker] = {}
    skipped: dict[str, str] = {}
    for kind in kinds:
        if kind == "lmcache" and lmcache_python is None:
            skipped[kind] = "no interpreter given (--lmcache-python or $LMCACHE_PYTHON)"
            continue
        own = folder / kind
        own.mkdir()
        settings = Settings(
            model=str(model),
            dtype=shape.dtype,
            folder=str(own),
            num_blocks=NUM_DEVICE_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            port=LMCACHE_PORT,
        )
        python = lmcache_python if kind == "lmcache" and lmcache_python else sys.executable
        started[kind] = stack.enter_context(Worker(kind, settings, folder, python=python))
    workers, described = {}, {}
    for kind, worker in started.items():
        try:
            described[kind] = worker.wait_ready()
            workers[kind] = worker
        except WorkerFailed as error:
            skipped[kind] = last_line(str(error))
    for kind, reason in skipped.items():
        print(f"  skipped {kind}: {reason}", flush=True)
    return workers, described, skipped


def last_line(message: str) -> str:
    """Of an engine's log: where Python puts the exception."""
    lines = [line for line in message.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line or "Missing" in line), lines[-1])


def idle_cpu_shares(workers: dict[str, Worker], seconds: float = 1.0) -> dict[str, float]:
    """Share of one core that each engine uses while nobody asks it anything."""
    before = {kind: worker.call("cpu_s") for kind, worker in workers.items()}
    time.sleep(seconds)
    return {
        kind: round((worker.call("cpu_s") - before[kind]) / seconds, 3) for kind, worker in workers.items()
    }


# -- what comes of it --------------------------------------------------------------------------------------------------


def bench(plan: Plan, kinds: Sequence[str], lmcache_python: str | None) -> None:
    shape = ModelShape()
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="overture-restore-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        print(f"starting engines on {shape.name} …", flush=True)
        workers, described, skipped = start_workers(kinds, shape, folder, lmcache_python, stack)
        if "stock" not in workers:
            raise SystemExit(f"stock vLLM does not start: {skipped.get('stock', 'not asked for')}")
        measured = Bench(plan, workers, described, shape.kv_token_bytes)
        measured.skipped |= skipped
        idle = idle_cpu_shares(workers)
        print(f"  idle engines use, of one core: {idle}", flush=True)
        show(measured, shape, idle, *run_all(measured))


def run_all(measured: Bench) -> tuple[Turns, dict[str, Any], float]:
    """Every part in turn; a part that our side cannot do yet is skipped with a line."""
    plan = measured.plan
    memcpy = measured.measure_memcpy()
    measured.say("follow-up turns")
    turns = measured.measure_turns()
    parts: dict[str, Any] = {}

    def run(what: str, measure: Any, *arguments: Any) -> None:
        try:
            parts[what] = measure(*arguments)
        except WorkerFailed as error:
            measured.skip(what, error)

    if "ours" in measured.workers:
        measured.say("copies and reads")
        run("host_copy", measured.measure_host_copy)
        run("disk_read_warm", measured.measure_disk_read, False)
        run("disk_read_cold", measured.measure_disk_read, True)
        measured.say("overlap")
        run("overlap", measured.measure_overlap)
    measured.say("decode")
    run("decode", measured.measure_decode)
    measured.say("sessions held")
    limit_s = HELD_WITHIN * (turns.median_s("stock", "device", SESSION_TOKENS) or 0.0)
    counts = {"stock": plan.held_stock, "ours": plan.held_ours}
    for kind in measured.workers:
        if kind != "ours_off" and counts.get(kind, plan.held_peers):
            run(f"held_{kind}", measured.measure_held, kind, counts.get(kind, plan.held_peers), limit_s)
    measured.say("done")
    return turns, parts, memcpy


def show(
    measured: Bench,
    shape: ModelShape,
    idle: dict[str, float],
    turns: Turns,
    parts: dict[str, Any],
    memcpy: float,
) -> None:
    floors = {tokens: tokens * shape.kv_token_bytes / memcpy for tokens in HISTORY_TOKENS}
    result: dict[str, Any] = dict.fromkeys(RESULTS)
    result["ttft_s"] = by_source(turns, "ours") or None
    result["restore_vs_recompute"] = restore_ratios(turns, "ours") or None
    rows = turn_rows(turns, floors)
    rows += copy_rows(parts, memcpy, result)
    rows += decode_rows(parts.get("decode", {}), result)
    decided = judged(repeats_of(parts), DECIDED)
    rows += [
        (f"{name}, 95% of its median", f"{decided['intervals'][name]}", f"{DECIDED[name]}: {said}")
        for name, said in decided["verdicts"].items()
    ]
    rows += held_rows(parts, result)
    rows.append(answer_row(turns, parts, result))
    result["peers"] = {
        kind: {
            "ttft_s": by_source(turns, kind),
            "restore_vs_recompute": restore_ratios(turns, kind),
            "sessions_held": parts.get(f"held_{kind}"),
        }
        for kind in measured.workers
        if kind not in ("ours", "ours_off")
    }
    result |= decided | {
        "parts": parts,
        "memcpy_bytes_per_s": round(memcpy),
        "kv_token_bytes": shape.kv_token_bytes,
        "num_device_blocks": NUM_DEVICE_BLOCKS,
        "model": shape.name,
        "engines": measured.described,
        "idle_cpu_share": idle,
        "skipped": measured.skipped,
        "is_quick": measured.plan is QUICK,
    }
    report("restore", rows, result)


def copy_rows(parts: dict[str, Any], memcpy: float, result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Table rows of copies, reads and loads; sets `host_copy_efficiency`, `disk_read_efficiency` and `overlap_gain`."""
    rows = []
    if "host_copy" in parts:
        result["host_copy_efficiency"] = round(statistics.median(parts["host_copy"]), 3)
        aim = f"{DECIDED['host_copy_efficiency']}; memcpy {memcpy / 1e9:.1f} GB/s"
        rows.append(("host copy ÷ memcpy", spread(parts["host_copy"]), aim))
    reads = {name: parts[f"disk_read_{name}"] for name in ("warm", "cold") if f"disk_read_{name}" in parts}
    for name, ratios in reads.items():
        aim = str(DECIDED["disk_read_efficiency"]) if name == "cold" else ""
        rows.append((f"disk read ÷ plain read, {name} page cache", spread(ratios), aim))
    if reads:
        medians = {name: round(statistics.median(ratios), 3) for name, ratios in reads.items()}
        result["disk_read_efficiency"] = medians.get("cold")
        result["disk_read_efficiency_warm"] = medians.get("warm")
    if "overlap" in parts:
        overlap = parts["overlap"]
        gains = [b / a for a, b in zip(overlap["layerwise_s"], overlap["blocking_s"], strict=True)]
        result["overlap_gain"] = round(statistics.median(gains), 3)
        rows.append(("TTFT blocking ÷ layer-wise load, slow disk", spread(gains), "2 would be perfect"))
    return rows


def answer_row(turns: Turns, parts: dict[str, Any], result: dict[str, Any]) -> tuple[str, str, str]:
    """Whether all answers are the same; sets `tokens_identical` and what goes with it."""
    result |= compare_answers(turns)
    if not parts.get("overlap", {}).get("is_same_answer", True):
        result["tokens_identical"] = False
        result["different"].append("ours, layer-wise against blocking load")
    aim = f"{AIMS['tokens_identical']}; {result['num_ambiguous_turns']} turns where stock vLLM differs from itself"
    return "tokens identical from all sources", f"{result['tokens_identical']}", aim


def decode_rows(rates: dict[str, list[float]], result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Table rows of decode throughput; sets `write_behind_overhead`."""
    rows = [
        (f"decode, {DECODE_STREAMS} streams, {kind}, tokens/s", spread(values), "")
        for kind, values in rates.items()
    ]
    if "ours" in rates and "ours_off" in rates:
        losses = _losses(rates)
        result["write_behind_overhead"] = round(statistics.median(losses), 4)
        rows.append(
            ("decode throughput lost to the tiers", spread(losses), str(DECIDED["write_behind_overhead"]))
        )
    return rows


def _losses(rates: dict[str, list[float]]) -> list[float]:
    """Shares of decode throughput that the tiers cost, by repeat."""
    pairs = zip(rates.get("ours", ()), rates.get("ours_off", ()), strict=False)
    return [1 - on / off for on, off in pairs]


def repeats_of(parts: dict[str, Any]) -> dict[str, list[float]]:
    """What the figures of DECIDED are medians of."""
    return {
        "host_copy_efficiency": parts.get("host_copy", []),
        "disk_read_efficiency": parts.get("disk_read_cold", []),
        "write_behind_overhead": _losses(parts.get("decode", {})),
    }


def held_rows(parts: dict[str, Any], result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Table rows of sessions held; sets `sessions_held_ratio`."""
    rows = [
        (
            f"sessions of {SESSION_TOKENS} tokens held, {name.removeprefix('held_')}",
            f"{part['held']}",
            f"p90 s: {part['p90_s']}",
        )
        for name, part in parts.items()
        if name.startswith("held_")
    ]
    if parts.get("held_stock", {}).get("held") and "held_ours" in parts:
        result["sessions_held_ratio"] = parts["held_ours"]["held"] / parts["held_stock"]["held"]
        rows.append(
            ("sessions held, ours ÷ stock", f"{result['sessions_held_ratio']}", AIMS["sessions_held_ratio"])
        )
    return rows


def main() -> None:
    parser = options(__doc__, quick="fewer repeats and sessions, within 5 minutes")
    parser.add_argument(
        "--lmcache-python",
        default=os.environ.get("LMCACHE_PYTHON"),
        help="an interpreter with vllm and lmcache ($LMCACHE_PYTHON)",
    )
    parser.add_argument("--only", default=",".join(KINDS), help=f"engines, of {','.join(KINDS)}")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines and files are cleared away
    kinds = [kind for kind in KINDS if kind in args.only.split(",")]
    bench(QUICK if args.quick else Plan(), kinds, args.lmcache_python)


if __name__ == "__main__":
    main()

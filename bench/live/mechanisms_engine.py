"""What `bench.live.mechanisms` measures on our node: advisories and adapters (A7, E4, E6, E8, E11), restores (E2, E10), the law of ranks (B4)."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.live.models import ModelShape, adapter_folders, model_folder
from bench.live.peers.adapters import AdapterSettings
from bench.live.peers.client import Worker, WorkerFailed
from bench.live.peers.engine import Settings
from bench.live.peers.mechanisms_node import MechanismNode, ProfiledNode
from bench.live.peers.play import text
from engine_bridge.protocol.node import ChatMessage

SHAPE = ModelShape()
BLOCK_TOKENS = 32
NUM_BLOCKS, MAX_MODEL_LEN = 150, 4096
RANKS = (128, 128, 64, 64)  # of the adapters there are: the largest cost most to bring
HISTORY_TOKENS, NEW_TOKENS, REPEATS = 512, 16, 7
PROMOTED_SESSIONS, PROMOTED_TOKENS, LARGE_TOKENS = 6, 1024, 3072
RESTORED_TOKENS, RESTORE_REPEATS = (512, 1024, 1920), 3
SWITCHED_WORDS, SWITCH_REPEATS = 100, 4  # of a question, as many of its answer: 1,400 tokens
LAW_S = 240.0
OFFLOADING = ("offloading", "simple_offload")


def settings(folder: Path) -> AdapterSettings:
    return AdapterSettings(
        model=str(model_folder(SHAPE)),
        dtype=SHAPE.dtype,
        folder=str(folder),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        adapters=[(path.name, str(path)) for path in adapter_folders(SHAPE, RANKS)],
        max_loras=4,
        max_lora_rank=max(RANKS),
        host_bytes=1 << 30,
        max_cpu_loras=0,
    )


@contextmanager
def node() -> Iterator[MechanismNode]:
    """One for several parts: it takes ten seconds to start."""
    with tempfile.TemporaryDirectory(prefix="overture-bench-") as folder:
        started = MechanismNode(settings(Path(folder)), Path(folder))
        try:
            started.wait_until(started.is_link_known)
            yield started
        finally:
            started.close()


# -- advisories --------------------------------------------------------------------------------------------------------


def giving_way(on: MechanismNode) -> dict[str, Any]:
    """A7: a large request on a device that is full of wrong guesses, and on one that is empty. Tenants keep the same prompt's KV apart."""
    sessions = begin(on, "wrong")
    prompt = text(LARGE_TOKENS, "large")
    found: dict[str, list[Any]] = {"none": [], "full": []}
    shares = []
    for repeat in range(3):
        for arm in ("none", "full") if repeat % 2 else ("full", "none"):
            on.place("host")
            records = [on.advise(session) for session in sessions] if arm == "full" else []
            num_cached = on.wait_still(on.num_cached_blocks)
            if records:
                shares.append(num_cached / NUM_BLOCKS)
            before = on.counts()
            asked = on.ask(prompt, tenant=f"{arm} {repeat}", num_tokens=8)
            steps, preempted = (after - was for after, was in zip(on.counts(), before, strict=True))
            found[arm].append((asked.ttft_s, steps, preempted, tuple(asked.answer)))
            for record in records:
                on.take_back(record)
    full, none = found["full"], found["none"]
    return {
        "promoted_share": round(min(shares), 3),
        "steps": {arm: [one[1] for one in runs] for arm, runs in found.items()},
        "steps_ratio": round(sum(one[1] for one in full) / sum(one[1] for one in none), 4),
        "num_preempted": sum(one[2] for one in full),
        "ttft_ms": {
            arm: round(statistics.median(one[0] for one in runs) * 1e3, 1) for arm, runs in found.items()
        },
        "ttft_change": round(
            statistics.median(one[0] / two[0] for one, two in zip(full, none, strict=True)) - 1, 4
        ),
        "is_same": len({one[3] for one in full + none}) == 1 and not any(one[2] for one in full),
    }


def begin(on: MechanismNode, name: str) -> list[str]:
    """Conversations that together fill the device and more."""
    sessions = [f"{name}{number}" for number in range(PROMOTED_SESSIONS)]
    for session in sessions:
        on.ask(text(PROMOTED_TOKENS + 1, session), session=session, num_tokens=1)
    on.settle()
    return sessions


def accounting(on: MechanismNode) -> dict[str, Any]:
    """E6: what advisories and metrics say was moved against what disk and copier have counted. Some come true, some are taken back on their way."""
    sessions = begin(on, "told")
    said, moved, counted = [0, 0], [0, 0], on.counted_bytes()
    states: dict[str, int] = {}
    for lead_s in (0.0, 0.01, 0.05, 1.0):
        on.place("disk")
        before = on.wait_still(on.moved_bytes)
        records = [on.advise(session) for session in sessions]
        time.sleep(lead_s)
        on.take_back(records[0])
        after = on.wait_still(on.moved_bytes)
        for session in sessions[1:4]:  # their requests come; the rest is wrong
            on.ask(text(PROMOTED_TOKENS + NEW_TOKENS, session), session=session, num_tokens=1)
        for record in records[1:]:
            on.take_back(record)
        on.wait_over(records)
        for record in records:
            assert record.report is not None
            said = [said[0] + record.report.host_bytes, said[1] + record.report.disk_bytes]
            states[record.report.state] = states.get(record.report.state, 0) + 1
        moved = [total + now - was for total, now, was in zip(moved, after, before, strict=True)]
    counted = [now - was for now, was in zip(on.counted_bytes(), counted, strict=True)]
    off = [
        abs(told / real - 1) if real else 1.0
        for figures in (said, counted)
        for told, real in zip(figures, moved, strict=True)
    ]
    return {
        "said_bytes": {"host": said[0], "disk": said[1]},
        "metrics_bytes": {"host": counted[0], "disk": counted[1]},
        "moved_bytes": {"host": moved[0], "disk": moved[1]},
        "states": states,
        "off_share": round(max(off), 4),
    }


def announced(on: MechanismNode) -> dict[str, Any]:
    """E4: a session under a cold adapter goes on, announced and not: its KV is in host memory, the adapter on disk; and with both on the device."""
    found: dict[str, list[float]] = {"resident": [], "cold": [], "announced": []}
    adapter = next(iter(on.folders))
    for repeat in range(REPEATS):
        session, history = f"goes-on{repeat}", text(HISTORY_TOKENS + 1, "goes on", repeat)
        on.ask(history, session=session, adapter=adapter, num_tokens=1)
        arms = list(found)
        for arm in arms[repeat % 3 :] + arms[: repeat % 3]:
            on.place("host")
            on.put_adapter(adapter, "disk" if arm != "resident" else "slot")
            if arm == "announced":
                record = on.advise(session, adapter)
                on.wait_warm(record, adapter)
            elif arm == "resident":
                on.ask(history, session=session, adapter=adapter, num_tokens=1)
            asked = on.ask(
                history + text(NEW_TOKENS, arm, repeat), session=session, adapter=adapter, num_tokens=1
            )
            found[arm].append(asked.ttft_s)
    return compared(found, "resident")


def switched(on: MechanismNode) -> dict[str, Any]:
    """E11: the first question after another adapter was picked, with its history computed under that one meanwhile, and not."""
    found: dict[str, list[float]] = {"at_once": [], "not": [], "resident": []}
    adapter = list(on.folders)[1]
    for repeat in range(SWITCH_REPEATS):
        arms = list(found)
        for arm in arms[repeat % 3 :] + arms[: repeat % 3]:
            session = f"switch-{arm}-{repeat}"
            question = " ".join(
                f"{list(found).index(arm)}{repeat}{number:04}" for number in range(SWITCHED_WORDS)
            )
            history = (ChatMessage("user", question), ChatMessage("assistant", question[::-1]))
            on.store_turn(session, question, question[::-1])
            on.ask(history, session=session, num_tokens=1)
            on.put_adapter(adapter, "slot")
            if arm == "at_once":
                on.switch(session, adapter)
            elif arm == "resident":
                on.ask(history, session=session, adapter=adapter, num_tokens=1)
            asked = on.ask(
                (*history, ChatMessage("user", "And now?")), session=session, adapter=adapter, num_tokens=1
            )
            found[arm].append(asked.ttft_s)
    return compared(found, "not")


def compared(found: Mapping[str, Sequence[float]], base: str) -> dict[str, Any]:
    """Median TTFTs, and medians of each repeat's ratio to the arm `base`."""
    result: dict[str, Any] = {
        "ttft_ms": {arm: round(statistics.median(times) * 1e3, 1) for arm, times in found.items()}
    }
    for arm, times in found.items():
        if arm != base:
            ratios = [one / other for one, other in zip(times, found[base], strict=True)]
            result[f"{arm}_vs_{base}"] = round(statistics.median(ratios), 3)
    return result


# -- whose KV ----------------------------------------------------------------------------------------------------------


def apart(on: MechanismNode) -> dict[str, Any]:
    """E8: part of a prompt's KV that is reused, from the device and from host memory, by who asks the same."""
    newer, _, adapter, other = on.folders  # nobody asks with the first one: its files are the new version's
    prompt = text(HISTORY_TOKENS, "apart")
    most = (HISTORY_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def reused(tenant: str, name: str) -> float:
        return on.ask(prompt, tenant=tenant, adapter=name, num_tokens=1).num_cached_tokens / most

    reused("one", adapter)
    same, others = {}, {}
    for tier in ("device", "host"):
        on.place(tier)
        # A stranger has KV of its own once it has asked: each asks once.
        others |= {
            f"tenant, {tier}": reused(f"two, {tier}", adapter),
            f"adapter, {tier}": reused("one", other) if tier == "device" else reused("one", ""),
        }
        same[tier] = reused("one", adapter)
    on.load(adapter, on.folders[newer])
    others["version"] = reused("one", adapter)
    on.load(adapter, on.folders[adapter])
    same["version back"] = reused("one", adapter)
    return {
        "reused_by_same": same,
        "reused_by_others": others,
        "same_share": round(min(same.values()), 4),
        "others_share": round(max(others.values()), 4),
    }


# -- restores ----------------------------------------------------------------------------------------------------------


def restores(on: MechanismNode) -> dict[str, Any]:
    """E10 and E2: the same turn from every tier, and what splitting its restore between computing and loading could save at best."""
    ttft_s: dict[str, dict[int, float]] = {source: {} for source in on.sources}
    is_same, is_restored = True, True
    for num_tokens in RESTORED_TOKENS:
        times: dict[str, list[float]] = {source: [] for source in on.sources}
        for repeat in range(RESTORE_REPEATS):
            history = text(num_tokens, "restored", repeat)
            prompt = history + text(NEW_TOKENS, "restored turn", repeat)
            answers = set()
            on.turn(history, 1)
            for source in ("device", "host", "disk_cold", "disk", "recompute"):
                on.place(source)
                turn = on.turn(prompt, 4)
                times[source].append(turn["ttft_s"])
                if source == "recompute":
                    continue
                answers.add(tuple(turn["token_ids"]))
                is_restored = is_restored and turn["num_cached_tokens"] >= num_tokens - BLOCK_TOKENS
                on.place("device")
            is_same = is_same and len(answers) == 1
        for source, found in times.items():
            ttft_s[source][num_tokens] = statistics.median(found)
    tail_s = ttft_s.pop("device")
    beyond = {
        source: {num: max(seconds - tail_s[num], 0.0) for num, seconds in found.items()}
        for source, found in ttft_s.items()
    }
    most = max(RESTORED_TOKENS)
    return {
        "ttft_ms": {
            source: {str(num): round(s * 1e3, 1) for num, s in found.items()}
            for source, found in ttft_s.items()
        },
        "device_ttft_ms": {str(num): round(s * 1e3, 1) for num, s in tail_s.items()},
        "is_restored": is_same and is_restored,
        "split_saves": {
            source: round(split_saves(beyond["recompute"], beyond[source], most), 4)
            for source in ("host", "disk_cold")
        },
    }


def split_saves(compute_s: Mapping[int, float], load_s: Mapping[int, float], num_tokens: int) -> float:
    """Share of the faster way's time that the best split saves: the front computed while the rest is loaded, both at full speed and at no other cost.

    compute_s, load_s: seconds by number of tokens; between these, and from none, straight lines.
    """
    best_s = min(
        max(on_line(compute_s, front), on_line(load_s, num_tokens - front))
        for front in range(0, num_tokens + 1, BLOCK_TOKENS)
    )
    whole_s = min(compute_s[num_tokens], load_s[num_tokens])
    return 1 - best_s / whole_s if whole_s > 0 else 0.0


def on_line(seconds: Mapping[int, float], num_tokens: int) -> float:
    points = [(0, 0.0), *sorted(seconds.items())]
    for (low, at_low), (high, at_high) in pairwise(points):
        if num_tokens <= high:
            return at_low + (at_high - at_low) * (num_tokens - low) / (high - low)
    raise ValueError(f"{num_tokens} tokens are more than were measured")


def refusals() -> dict[str, Any]:
    """E10: what vLLM's own connectors for host memory say on this platform; "" if one restores a prompt's KV."""
    said = {}
    with tempfile.TemporaryDirectory(prefix="overture-bench-") as folder, ExitStack() as stack:
        plain = Settings(
            model=str(model_folder(SHAPE)),
            dtype=SHAPE.dtype,
            folder=folder,
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
        )
        for kind in OFFLOADING:
            worker = stack.enter_context(Worker(kind, plain, Path(folder)))
            try:
                worker.wait_ready()
                prompt = text(HISTORY_TOKENS, kind)
                worker.call("turn", tokens=prompt, max_tokens=2)
                worker.call("place", source="recompute")
                turn = worker.call("turn", tokens=prompt, max_tokens=2)
                said[kind] = "" if turn["num_cached_tokens"] else "it starts and restores nothing"
            except WorkerFailed as error:
                said[kind] = str(error).strip().splitlines()[-1][:300]
    return {"said": said, "are_refused": all(said.values())}


# -- the law of ranks --------------------------------------------------------------------------------------------------


def law() -> dict[str, Any]:
    """B4: how well what adapters add to a decode step lies on a line over the sum of their ranks, and over their number times the largest."""
    with tempfile.TemporaryDirectory(prefix="overture-bench-") as folder:
        profiled = ProfiledNode(settings(Path(folder)))
        try:
            scratch = Path(folder) / "made"
            scratch.mkdir()
            found = profiled.laws(scratch, LAW_S)
        finally:
            profiled.close()
    return {
        "sum_rank_r2": round(found.mbgmv.r2, 4),
        "max_rank_r2": round(found.bgmv.r2, 4),
        "us_a_rank": round(found.mbgmv.a * 1e6, 2),
        "num_steps": found.num_steps,
    }

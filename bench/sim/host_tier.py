"""How good is the host tier's eviction policy? Recorded traffic against the live store, in virtual time.

    python -m bench.sim.host_tier [--trace PATH] [--nodes 0,1,2,3] [--shares 0.03,0.1] [--part main|sweep] [--quick] [--seed N]

What runs: `KvStore` itself, with its groups, bands, batches and pins, on a virtual clock; only bytes are missing (one per layer and block) and the
disk, which remembers keys, answers at once and never forgets. Every policy sees the same requests. A replay has no noise of its own, only the
jitter that spreads arrivals over the trace's ticks of 3 s, by `--seed`; so the repeats are other traffic, not the same once more: the trace's
41,000 prompt tokens a second are split over four nodes by the first block that tells prompts apart, and each node is replayed by itself.

Traffic: Mooncake's conversation trace (FAST'25, Apache-2.0): 12,031 requests in an hour, prompts as chained ids of 512-token blocks. Without it, a
generator with its quantiles. Sessions are inferred: a request continues the session whose latest prompt, all its full blocks (at least one behind
the block that all prompts share), is the beginning of this one; any other request starts a session, even where it shares blocks. That gives 3,932
follow-ups with gaps of 42, 123, 474 and 1,452 s (p10, p50, p90, p99). In front of the store, the device caches the latest 750 blocks. Left out:
blocks of answers, which have no ids; the block that all prompts share, always on the device; announced turns and deleted sessions.

Cost: Llama-3-8B in bf16 (32 layers, 128 KiB of KV per token) on an A100 (10,000 tokens/s: half of 312 TFLOPS at 16 GFLOP a token) or an L4
(3,750), host to device at 25 GB/s, disk at 3 or 1 GB/s for each request alone. A layer of the new text is computed when those before it are, and
the history's KV of that layer is on the device; missing KV comes from disk in the order of layers. Only the first chunk (8,192 tokens) overlaps.
Where prefilling all that host memory does not hold whole is faster than the disk, it is prefilled, as `FasterWins` would. The stall is what all
this adds to computing the new text alone: the part of the time to first token that a larger host tier would save.

The last line is JSON. `runs[]`, for each policy and host size (`host_share` of the distinct KV in a node's trace; `host_bytes`, of one node on
average), all nodes together: `hit_share` of the restored bytes that were in host memory, `first_half_hit_share` the same of the first half of the
layers, `disk_read_bytes_per_s` of one node on average, `stall_mean_ms` and `stall_p99_ms` over requests that restore anything, by device and disk;
`stall_mean_ms_by_node` of the first device and disk. The table shows the mean's range over nodes behind it. `stall_vs_lru[policy][host_share]`: mean
stall over that of `Lru` with as much host memory, the worst of the devices and disks.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import json
import math
import random
import statistics
import sys
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.data import MOONCAKE, are_recorded, lines_of
from bench.live.report import report
from kvtiers.io.io_thread import IoThread
from kvtiers.io.records import Record
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.policy.eviction import NUM_BANDS, ByValue, EvictionPolicy, GroupFacts, Lru, Victim, first_layer
from kvtiers.store import KvStore

TICK_S = 3.0
BLOCK_TOKENS = 512
NUM_COMMON_BLOCKS = 1
NUM_NODES = 4  # of 10,000 tokens/s each, for the trace's 41,000
NUM_DEVICE_BLOCKS = 750  # 50 GB: what 80 GB leave beside weights and activations
BLOCK_BYTES = BLOCK_TOKENS * (128 << 10)
MODEL_LAYERS = 32
HOST_TO_DEVICE_BYTES_PER_S = 25e9
CHUNK_TOKENS = 8192  # vLLM's default budget of a step on such devices
SHAPE = BlockShape(num_layers=NUM_BANDS, layer_bytes=1)
HOST_SHARES = (0.01, 0.03, 0.1, 0.3)
SWEPT_SHARES = (0.03, 0.1)


# -- traffic -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the trace. `block_ids`: chained, so an id stands for all that is before it, too; the last block may be partial."""

    at_s: float
    num_tokens: int
    block_ids: Sequence[int]

    @property
    def full_block_ids(self) -> Sequence[int]:
        return self.block_ids[: self.num_tokens // BLOCK_TOKENS]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of a known session. `keys`: its full blocks without the common one."""

    at_s: float
    session: str
    num_tokens: int
    keys: list[BlockKey]


def read_trace(path: Path) -> list[Prompt]:
    """The trace's prompts, packed or not."""
    rows = map(json.loads, lines_of(path))
    return [Prompt(row["timestamp"] / 1000, row["input_length"], row["hash_ids"]) for row in rows]


def generate(rng: random.Random, num_sessions: int = 8137, span_s: float = 3537.0) -> list[Prompt]:
    """Traffic with the trace's rates and quantiles, for machines that do not have it.

    Log-normal, fitted to it: first prompts, gaps, and what a follow-up adds. Its short prompts are fewer: 4% below 1,024 tokens instead of 11%.
    """
    prompts: list[Prompt] = []
    num_blocks = NUM_COMMON_BLOCKS
    for _ in range(num_sessions):
        at_s, num_tokens, block_ids = rng.uniform(0, span_s), rng.lognormvariate(math.log(5900), 1.12), [0]
        while at_s < span_s:
            num_new = math.ceil(num_tokens / BLOCK_TOKENS) - len(block_ids)
            block_ids = block_ids + list(range(num_blocks, num_blocks + num_new))
            num_blocks += max(num_new, 0)
            prompts.append(Prompt(at_s // TICK_S * TICK_S, int(num_tokens), block_ids))
            if rng.random() > 0.35:  # 3,894 follow-ups, some of which the end of the trace cuts off
                break
            at_s += rng.lognormvariate(math.log(126), 1.05)
            del block_ids[int(num_tokens) // BLOCK_TOKENS :]
            num_tokens += rng.lognormvariate(math.log(733), 1.37)
    return sorted(prompts, key=lambda prompt: prompt.at_s)


def requests_of(prompts: Sequence[Prompt], rng: random.Random) -> list[Request]:
    """Prompts in order, spread over their ticks, each with the session that it continues or starts (see the module's docstring)."""
    times = sorted(prompt.at_s + rng.uniform(0, TICK_S) for prompt in prompts)
    ends: dict[int, str] = {}  # last full block of a session's latest prompt: the session
    requests = []
    for at_s, prompt in zip(times, prompts, strict=True):
        chain = prompt.full_block_ids[NUM_COMMON_BLOCKS:]
        if not chain:
            continue  # nothing to save or restore
        end = next((block_id for block_id in reversed(chain) if block_id in ends), None)
        session = f"s{len(requests)}" if end is None else ends.pop(end)
        ends[chain[-1]] = session
        keys = [BlockKey(block_id.to_bytes(4, "big")) for block_id in chain]
        requests.append(Request(at_s, session, prompt.num_tokens, keys))
    return requests


def node_of(request: Request) -> int:
    """Where a request goes: sessions that share a block share a node."""
    return zlib.crc32(request.keys[0]) % NUM_NODES


# -- the store in virtual time -----------------------------------------------------------------------------------------


class InlineIo(IoThread):
    """Runs the store's file work on the caller's thread as far as it gets without waiting; with `MemoryDisk`, to the end."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        task = self.loop.create_task(work)
        self._turn()
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        if task.done():
            future.set_result(task.result())
        else:
            self._tasks.append(
                task
            )  # the store's writer, which sleeps in real time: `flush` is always faster
        return future

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._turn()
        self.loop.close()

    def _turn(self) -> None:
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()


class MemoryDisk:
    """A disk tier of keys: takes and gives everything at once, and notes what was read."""

    def __init__(self) -> None:
        self._keys: set[BlockKey] = set()
        self.read_keys: set[BlockKey] = set()
        self.num_read = [0] * SHAPE.num_layers
        """Blocks read per layer since `forget_reads`."""

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def forget_reads(self) -> None:
        self.read_keys, self.num_read = set(), [0] * SHAPE.num_layers

    async def append_all(self, records: Sequence[Record]) -> bool:
        for record in records:
            self._keys.update(record.keys)
        return True

    async def read(
        self,
        keys: Sequence[BlockKey],
        part: object,
        *,
        first_layer: int,
        on_layer: Callable[[int], None],
        on_bad: object,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.read_keys.update(keys)
        for layer in range(first_layer, SHAPE.num_layers):
            self.num_read[layer] += len(keys)
            on_bytes(len(keys) * SHAPE.layer_bytes)
            on_layer(layer)

    async def close(self) -> None: ...


class DeviceCache:
    """The device's own prefix cache: the latest blocks; of a prompt, the last ones leave first."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def count_held(self, keys: Sequence[BlockKey]) -> int:
        """Leading keys that are held."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def put(self, keys: Sequence[BlockKey]) -> None:
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._num_blocks:
            self._keys.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Restore:
    """What one request found. `num_read`: blocks that lacked a layer, per layer of the store."""

    num_blocks: int
    num_whole_blocks: int
    """Leading blocks that were in host memory with all layers."""
    num_read: Sequence[int]
    num_new_tokens: int


def replay(requests: Sequence[Request], policy: EvictionPolicy, num_host_blocks: int) -> list[Restore]:
    """Stage and save every request's blocks in the live store. Returns what those that any tier knew something of found."""
    io, disk, device, now = InlineIo(), MemoryDisk(), DeviceCache(NUM_DEVICE_BLOCKS), [0.0]
    host_bytes = num_host_blocks * SHAPE.block_bytes
    store = KvStore(SHAPE, host_bytes, io, disk, policy, clock=lambda: now[0])  # type: ignore[arg-type]
    restores = []
    for request in requests:
        now[0] = request.at_s
        disk.forget_reads()
        store.enter(request.session)
        num_held = device.count_held(request.keys)
        wanted = request.keys[num_held:]
        stage = store.stage(request.session, wanted)
        num_blocks = len(stage.blocks)
        store.release(stage)
        if num_blocks:
            is_whole = (key not in disk.read_keys for key in wanted[:num_blocks])
            num_whole = next((i for i, whole in enumerate(is_whole) if not whole), num_blocks)
            num_new = request.num_tokens - (NUM_COMMON_BLOCKS + num_held + num_blocks) * BLOCK_TOKENS
            restores.append(Restore(num_blocks, num_whole, disk.num_read, num_new))
        store.commit(store.begin_save(request.session, request.keys))
        store.flush()
        store.leave(request.session)
        device.put(request.keys)
    store.check_invariants()
    store.close()
    io.close()
    return restores


# -- policies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StrictA6:
    """Latest layers of all sessions first, then the smallest KV, however likely a session is to come back.

    Source: SYMPHONY §4.3, taken at its word.
    """

    def order(self, groups: Sequence[GroupFacts], num_layers: int, now: float) -> Iterator[Victim]:
        by_size = sorted(groups, key=lambda facts: (facts.num_bytes, facts.group))
        for band in reversed(range(NUM_BANDS)):
            for facts in by_size:
                yield Victim(facts.group, first_layer(band, num_layers))


@dataclass(frozen=True, slots=True)
class Clairvoyant:
    """The session whose next request is farthest away first, whole: a ceiling for the share of hits (Belady's rule, by session)."""

    times_s: dict[str, list[float]]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Clairvoyant:
        times_s: dict[str, list[float]] = {}
        for request in requests:
            times_s.setdefault(request.session, []).append(request.at_s)
        return cls(times_s)

    def order(self, groups: Sequence[GroupFacts], num_layers: int, now: float) -> Iterator[Victim]:
        for facts in sorted(groups, key=lambda facts: (-self._next_s(facts.group, now), facts.group)):
            yield Victim(facts.group, 0)

    def _next_s(self, group: str, now: float) -> float:
        times_s = self.times_s[group]
        at = bisect_right(times_s, now)
        return times_s[at] if at < len(times_s) else math.inf


PolicyFor = Callable[[Sequence[Request]], EvictionPolicy]
MAIN: dict[str, PolicyFor] = {
    "Lru": lambda requests: Lru(),
    "ByValue": lambda requests: ByValue(),
    "strict A6": lambda requests: StrictA6(),
    "clairvoyant": Clairvoyant.of,
}
SWEEP: dict[str, PolicyFor] = {
    "half-life 0.5 pauses": lambda requests: ByValue(half_life_pauses=0.5),
    "half-life 1.6 pauses": lambda requests: ByValue(half_life_pauses=1.6),
    "half-life 10 pauses": lambda requests: ByValue(half_life_pauses=10.0),
    "weight 0": lambda requests: ByValue(band_weight=0.0),
    "weight 0.5": lambda requests: ByValue(band_weight=0.5),
    "weight 1": lambda requests: ByValue(band_weight=1.0),
    "weight 2": lambda requests: ByValue(band_weight=2.0),
    "prior 1": lambda requests: ByValue(num_prior_uses=1),
}
PARTS = {"main": (MAIN, HOST_SHARES), "sweep": (SWEEP, SWEPT_SHARES)}


# -- what it costs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """A device and a disk."""

    name: str
    prefill_tokens_per_s: float
    disk_bytes_per_s: float

    def stall_s(self, restore: Restore) -> float:
        """Time to the first token beyond computing the new text: by loading or by prefilling again, whichever is faster."""
        return min(self._load_stall_s(restore), self._recompute_stall_s(restore))

    def _load_stall_s(self, restore: Restore) -> float:
        layer_bytes = BLOCK_BYTES / MODEL_LAYERS
        copy_s = restore.num_blocks * layer_bytes / HOST_TO_DEVICE_BYTES_PER_S
        overlapped_s = min(restore.num_new_tokens, CHUNK_TOKENS) / self.prefill_tokens_per_s
        read_at = copied_at = computed_at = 0.0
        for layer in range(MODEL_LAYERS):
            num_read = restore.num_read[layer * SHAPE.num_layers // MODEL_LAYERS]
            read_at += num_read * layer_bytes / self.disk_bytes_per_s
            copied_at = max(copied_at, read_at if num_read else 0.0) + copy_s
            computed_at = max(computed_at, copied_at) + overlapped_s / MODEL_LAYERS
        return computed_at - overlapped_s

    def _recompute_stall_s(self, restore: Restore) -> float:
        copy_s = restore.num_whole_blocks * BLOCK_BYTES / HOST_TO_DEVICE_BYTES_PER_S
        num_tokens = (restore.num_blocks - restore.num_whole_blocks) * BLOCK_TOKENS
        return copy_s + num_tokens / self.prefill_tokens_per_s


COSTS = (
    Cost("A100, 3 GB/s", 10_000, 3e9),
    Cost("A100, 1 GB/s", 10_000, 1e9),
    Cost("L4, 3 GB/s", 3_750, 3e9),
)


def hit_share(restores: Sequence[Restore], num_layers: int) -> float:
    """Of the bytes restored, in the first `num_layers` of the store's layers, those that were in host memory."""
    wanted = sum(restore.num_blocks for restore in restores) * num_layers
    return 1 - sum(sum(restore.num_read[:num_layers]) for restore in restores) / max(wanted, 1)


def measure(nodes: Sequence[Sequence[Request]], policy_for: PolicyFor, host_share: float) -> dict[str, Any]:
    """All figures of one policy at one host size."""
    num_blocks = [int(host_share * len({key for r in requests for key in r.keys})) for requests in nodes]
    by_node = [
        replay(requests, policy_for(requests), size) for requests, size in zip(nodes, num_blocks, strict=True)
    ]
    restores = [restore for node in by_node for restore in node]
    span_s = sum(requests[-1].at_s - requests[0].at_s for requests in nodes)
    read_bytes = sum(sum(restore.num_read) for restore in restores) / SHAPE.num_layers * BLOCK_BYTES
    stalls_ms = {cost.name: sorted(cost.stall_s(r) * 1e3 for r in restores) for cost in COSTS}
    return {
        "host_share": host_share,
        "host_bytes": int(statistics.mean(num_blocks)) * BLOCK_BYTES,
        "num_restores": len(restores),
        "hit_share": round(hit_share(restores, NUM_BANDS), 4),
        "first_half_hit_share": round(hit_share(restores, NUM_BANDS // 2), 4),
        "disk_read_bytes_per_s": round(read_bytes / span_s),
        "stall_mean_ms": {name: round(statistics.mean(ms), 1) for name, ms in stalls_ms.items()},
        "stall_p99_ms": {name: round(ms[int(0.99 * len(ms))]) for name, ms in stalls_ms.items()},
        "stall_mean_ms_by_node": [
            round(statistics.mean(COSTS[0].stall_s(r) for r in node) * 1e3, 1) for node in by_node
        ],
    }


def vs_lru(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """`stall_vs_lru` of the module's text: by policy and host size, where `Lru` was replayed with as much."""
    baselines = {run["host_share"]: run["stall_mean_ms"] for run in runs if run["policy"] == "Lru"}
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        lru = baselines.get(run["host_share"])
        if lru is not None and run["policy"] != "Lru":
            worst = max(mean_ms / lru[name] for name, mean_ms in run["stall_mean_ms"].items())
            found.setdefault(run["policy"], {})[f"{run['host_share']:.0%}"] = round(worst, 3)
    return found


HEADER = "  hit   1st half  disk     " + "".join(f"{cost.name + ' mean p99':>24}" for cost in COSTS) + " ms"


def row_of(name: str, run: dict[str, Any]) -> tuple[str, str, str]:
    """One line of the table."""
    means, p99s, by_node = run["stall_mean_ms"], run["stall_p99_ms"], run["stall_mean_ms_by_node"]
    stalls = "".join(f"{means[cost.name]:>18.0f}{p99s[cost.name]:>6}" for cost in COSTS)
    figures = f"{run['hit_share']:6.1%} {run['first_half_hit_share']:6.1%} "
    figures += f"{run['disk_read_bytes_per_s'] / 1e9:5.2f} GB/s {stalls}"
    return f"{run['host_share']:4.0%}  {name}", figures, f"  ({min(by_node):.0f} … {max(by_node):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, default=MOONCAKE)
    parser.add_argument("--nodes", default="0,1,2,3", help="which of the four are replayed")
    parser.add_argument("--shares", default="", help="host sizes, as shares of the distinct KV")
    parser.add_argument("--part", choices=PARTS, action="append", help="which policies; all by default")
    parser.add_argument("--quick", action="store_true", help="one node, main part")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    is_recorded = are_recorded(args.trace)
    requests = requests_of(read_trace(args.trace) if is_recorded else generate(rng), rng)
    chosen = [0] if args.quick else [int(node) for node in args.nodes.split(",")]
    nodes = [[request for request in requests if node_of(request) == node] for node in chosen]
    parts = ["main"] if args.quick else args.part or list(PARTS)
    runs = []
    for policies, shares in (PARTS[part] for part in parts):
        for share in map(float, args.shares.split(",")) if args.shares else shares:
            for name, policy_for in policies.items():
                runs.append({"policy": name} | measure(nodes, policy_for, share))
                print(*row_of(name, runs[-1]), file=sys.stderr, flush=True)
    result = {
        "bench": "host_tier",
        "trace": args.trace.name if is_recorded else "generated",
        "is_recorded": is_recorded,
        "seed": args.seed,
        "nodes": chosen,
        "num_requests": sum(map(len, nodes)),
        "stall_vs_lru": vs_lru(runs),
        "runs": runs,
    }
    rows = [("host  policy", HEADER, "  (mean, by node)"), *(row_of(run["policy"], run) for run in runs)]
    report("Host tier, replayed in virtual time", rows, result)


if __name__ == "__main__":
    main()

"""How good is the host tier's eviction policy? Recorded traffic against the live store, in virtual time.

    python -m bench.emulated host_tier [--part recorded|made ...] [--quick] [--seed N] [--jobs N]

What runs: `KvStore` itself, with its groups, bands, batches and pins, on a virtual clock; only bytes are missing (one for each layer and block) and
the disk, which remembers keys, answers at once and never forgets. Both policies see the same requests: `ByValue`, which serves, and `Lru`.

Traffic: Mooncake's conversation trace (FAST'25, Apache-2.0): 12,031 requests in an hour, prompts as chained ids of 512-token blocks, spread over the
trace's ticks of 3 s by `--seed`. Its 41,000 prompt tokens a second are split over four nodes by the first block that tells prompts apart, and each
node is replayed by itself. Sessions are inferred: a request continues the session whose latest prompt, all its full blocks (at least one behind the
block that all prompts share), is the beginning of this one; any other request starts a session. Made traffic (`MADE`): sessions of several laws of
turns and pauses, one node. In front of the store, the device caches the latest 750 blocks (of made traffic a fifth of host memory). Left out: blocks
of answers, which have no ids; the block that all prompts share, always on the device.

Cost: Llama-3-8B in bf16 (32 layers, 128 KiB of KV per token) on an A100 (10,000 tokens/s: half of 312 TFLOPS at 16 GFLOP a token) or an L4
(3,750), host to device at 25 GB/s, disk at 3 or 1 GB/s for each request alone. A layer of the new text is computed when those before it are, and
the history's KV of that layer is on the device; missing KV comes from disk in the order of layers. Only the first chunk (8,192 tokens) overlaps.
Where prefilling all that host memory does not hold whole is faster than the disk, it is prefilled. The stall is what all this adds to computing the
new text alone: the part of the time to first token that a larger host tier would save.

The last line is JSON. `stall_vs_lru.ByValue`: mean stall over that of `Lru` with as much host memory (a share of the distinct KV in a node's trace),
the worst of the devices and disks, over all requests that restore anything; `stall_mean_ms`: by policy, share, device and disk. `worst_vs_lru`: the
worst of all single nodes and made traffic; `mooncake_3pct`: all nodes together, of the recorded traffic, with the smaller host memory.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from bench.data import MOONCAKE, are_recorded, lines_of
from bench.emulated.core.clock import Clock
from bench.emulated.core.virtual_io import VirtualIo
from bench.emulated.table import Bench, Table
from kvtiers.io.block_read import BlockRead
from kvtiers.io.records import Record
from kvtiers.keys import BlockKey, BlockShape
from kvtiers.policy.eviction import NUM_BANDS, ByValue, EvictionPolicy, Lru
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


# -- traffic -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of a known session. `keys`: its full blocks without the common one."""

    at_s: float
    session: str
    num_tokens: int
    keys: list[BlockKey]


@cache
def recorded_requests(seed: int) -> list[Request]:
    """Return the trace's prompts in order, spread over their ticks, each with the session that it continues or starts (see the module's docstring).

    The trace's block ids are chained: an id implies all blocks before it; the last block may be partial.
    """
    rng, rows = random.Random(seed), [json.loads(line) for line in lines_of(MOONCAKE)]
    times = sorted(row["timestamp"] / 1000 + rng.uniform(0, TICK_S) for row in rows)
    ends: dict[int, str] = {}  # last full block of a session's latest prompt: the session
    requests = []
    for at_s, row in zip(times, rows, strict=True):
        chain = row["hash_ids"][NUM_COMMON_BLOCKS : row["input_length"] // BLOCK_TOKENS]
        if not chain:
            continue  # nothing to save or restore
        end = next((block_id for block_id in reversed(chain) if block_id in ends), None)
        session = f"s{len(requests)}" if end is None else ends.pop(end)
        ends[chain[-1]] = session
        keys = [BlockKey(block_id.to_bytes(4, "big")) for block_id in chain]
        requests.append(Request(at_s, session, row["input_length"], keys))
    return requests


@cache
def requests_of_node(node: int, seed: int) -> list[Request]:
    """Return the requests that a node serves: sessions that share a block share a node. Without the trace they are made, other ones for each node."""
    if not MOONCAKE.exists():
        return made_requests("agents and people", seed=NUM_NODES * seed + node)
    recorded = recorded_requests(seed)
    return [request for request in recorded if zlib.crc32(request.keys[0]) % NUM_NODES == node]


@dataclass(frozen=True, slots=True)
class Made:
    """Sessions of one kind. continues: the probability of another turn; num_turns: instead, an exact number. spread: of a pause's logarithm."""

    pause_s: float
    spread: float
    continues: float = 0.0
    num_turns: int = 0

    def turns(self, rng: random.Random) -> int:
        """Return the number of a session's requests."""
        num = self.num_turns or 1
        while not self.num_turns and num < MOST_TURNS and rng.random() < self.continues:
            num += 1
        return num


# Of each traffic: its kinds of sessions, of which as many of each begin.
MADE = {
    "quick": (Made(2.0, 0.8, continues=0.8),),
    "short": (Made(30.0, 1.0, continues=0.25),),
    "three turns": (Made(60.0, 0.8, num_turns=3),),
    "two turns, quick": (Made(4.0, 0.5, num_turns=2),),
    "long": (Made(60.0, 1.5, continues=0.92),),
    "agents and people": (Made(1.5, 0.6, continues=0.9), Made(120.0, 1.0, continues=0.7)),
}
MADE_REQUESTS, MADE_SPAN_S, MOST_TURNS = 3000, 1800.0, 40
FIRST_TOKENS, MORE_TOKENS = (4000, 1.0), (1200, 0.8)  # medians and spreads of the logarithm


@cache
def made_requests(name: str, seed: int) -> list[Request]:
    """Return requests of made sessions, which begin evenly over the span."""
    rng, made, requests, next_id = random.Random(f"{name} {seed}"), MADE[name], list[Request](), 1
    while len(requests) < MADE_REQUESTS:
        kind, at_s, session = rng.choice(made), rng.random() * MADE_SPAN_S, f"s{next_id}"
        num_tokens, keys = rng.lognormvariate(math.log(FIRST_TOKENS[0]), FIRST_TOKENS[1]), list[BlockKey]()
        for _ in range(kind.turns(rng)):
            num_new = int(num_tokens) // BLOCK_TOKENS - len(keys)
            keys = [
                *keys,
                *(BlockKey(number.to_bytes(4, "big")) for number in range(next_id, next_id + num_new)),
            ]
            next_id += num_new + 1
            requests.append(Request(at_s, session, int(num_tokens), keys))
            num_tokens += rng.lognormvariate(math.log(MORE_TOKENS[0]), MORE_TOKENS[1])
            at_s += rng.lognormvariate(math.log(kind.pause_s), kind.spread)
    return sorted((each for each in requests if each.keys), key=lambda request: request.at_s)


# -- the store in virtual time -----------------------------------------------------------------------------------------


class MemoryDisk:
    """A disk tier of keys: it takes and gives everything at once, and notes the blocks that are read."""

    def __init__(self) -> None:
        self._keys: set[BlockKey] = set()
        self.read_keys: set[BlockKey] = set()
        self.num_read = [0] * SHAPE.num_layers
        """Blocks read per layer since `forget_reads`."""

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def forget_reads(self) -> None:
        """Begin to count reads anew."""
        self.read_keys, self.num_read = set(), [0] * SHAPE.num_layers

    async def append_all(self, records: Sequence[Record]) -> bool:
        """Have these records at once."""
        for record in records:
            self._keys.update(record.keys)
        return True

    async def read(self, wanted: BlockRead) -> None:
        """Give the blocks at once."""
        self.read_keys.update(wanted.keys)
        for layer in range(wanted.first_layer, SHAPE.num_layers):
            self.num_read[layer] += len(wanted.keys)
            wanted.on_bytes(len(wanted.keys) * SHAPE.layer_bytes)
            wanted.on_layer(layer)

    async def close(self) -> None:
        """Do nothing: there is no file."""


class DeviceCache:
    """The device's own prefix cache: the latest blocks; of a prompt, the last ones leave first."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def count_held(self, keys: Sequence[BlockKey]) -> int:
        """Leading keys that are held."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def put(self, keys: Sequence[BlockKey]) -> None:
        """Hold these blocks, and drop the oldest beyond the size."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._num_blocks:
            self._keys.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Restore:
    """The KV that one request found. `num_read`: blocks that lacked a layer, per layer of the store."""

    num_blocks: int
    num_whole_blocks: int
    """Leading blocks that were in host memory with all layers."""
    num_read: Sequence[int]
    num_new_tokens: int


def replay(
    requests: Sequence[Request], policy: EvictionPolicy, num_host_blocks: int, num_device_blocks: int
) -> list[Restore]:
    """Stage and save every request's blocks in the live store. Return a `Restore` for each request of whose blocks a tier had any."""
    clock, disk, device = Clock(), MemoryDisk(), DeviceCache(num_device_blocks)
    io = VirtualIo(clock)
    host_bytes = num_host_blocks * SHAPE.block_bytes
    store = KvStore(SHAPE, host_bytes, io, disk, policy, clock=lambda: clock.now)  # type: ignore[arg-type]
    restores = []
    for request in requests:
        clock.now = request.at_s  # no event is run: the store's writer sleeps, and `flush` is always faster
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


# -- costs -------------------------------------------------------------------------------------------------------------


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


# -- the command -------------------------------------------------------------------------------------------------------

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"Lru": Lru, "ByValue": ByValue}
HOST_SHARES = (0.03, 0.1)


@dataclass(frozen=True, slots=True)
class Point:
    """One replay of a node's requests, or of made ones. host_share: of the distinct KV, that host memory holds."""

    policy: str
    host_share: float
    node: int = 0
    made: str = ""
    seed: int = 0


def serve(point: Point) -> list[Restore]:
    """Replay one point."""
    requests = (
        made_requests(point.made, point.seed) if point.made else requests_of_node(point.node, point.seed)
    )
    num_blocks = int(point.host_share * len({key for request in requests for key in request.keys}))
    num_device_blocks = num_blocks // 5 if point.made else NUM_DEVICE_BLOCKS
    return replay(requests, POLICIES[point.policy](), num_blocks, num_device_blocks)


def mean_stalls(found: Iterable[Sequence[Restore]]) -> dict[Cost, float]:
    """Return the mean stall over these replays, in seconds."""
    restores = [restore for each in found for restore in each]
    return {cost: statistics.mean(cost.stall_s(restore) for restore in restores) for cost in COSTS}


def worst_vs_lru(bench: Bench, points: Iterable[Point]) -> float:
    """Return the mean stall with the policy that serves over that with `Lru`, over these replays together, the worst of all devices."""
    ours, lru = (
        mean_stalls([found for point in points for found in bench.of(replace(point, policy=name))])
        for name in ("ByValue", "Lru")
    )
    return max(ours[cost] / lru[cost] for cost in COSTS)


def recorded_part(bench: Bench) -> None:
    """Find the mean stalls with each policy and size of host memory, and the worst over LRU's."""
    bench.note(("is_recorded",), are_recorded(MOONCAKE))
    nodes = range(int(bench.size))
    bench.play(Point(name, share, node) for share in HOST_SHARES for name in POLICIES for node in nodes)
    for share in HOST_SHARES:
        for name in POLICIES:
            found = mean_stalls(found for node in nodes for found in bench.of(Point(name, share, node)))
            for cost in COSTS:
                place = ("stall_mean_ms", f"{share:.0%}", name, cost.name)
                bench.figure(place, [round(found[cost] * 1e3, 1)], unit="ms")
        together = worst_vs_lru(bench, [Point("", share, node) for node in nodes])
        bench.figure(("stall_vs_lru", "ByValue", f"{share:.0%}"), [together], 1.0, unit="ratio")
        if share == HOST_SHARES[0]:
            bench.figure(("mooncake_3pct",), [together], 0.85, unit="ratio")


def made_part(bench: Bench) -> None:
    """Find the worst over LRU's of made traffic, and of single nodes of the recorded one."""
    made = [
        Point(name, share, made=traffic) for traffic in MADE for share in HOST_SHARES for name in POLICIES
    ]
    bench.play(made)
    worst = []
    for traffic, share in product(MADE, HOST_SHARES):
        ratio = worst_vs_lru(bench, [Point("", share, made=traffic)])
        worst.append(bench.figure(("made", traffic, f"{share:.0%}"), [ratio], unit="ratio"))
    for node, share in product(range(int(bench.size)), HOST_SHARES):
        ratio = worst_vs_lru(bench, [Point("", share, node)])
        worst.append(bench.figure(("nodes", f"{node}", f"{share:.0%}"), [ratio], unit="ratio"))
    bench.figure(("worst_vs_lru",), [max(worst)], 1.01, unit="ratio")


TABLE = Table(
    "emulated-hosttier",
    "Host tier, replayed",
    serve,
    {"recorded": recorded_part, "made": made_part},
    (NUM_NODES, 1),
    "one node of four",
    seeds=1,
)

"""What `bench.live.mechanisms` measures without an engine: CPU workers for cold adapters, and what many adapters and nodes take to look up."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.measures import quantile
from engine_bridge.adapters.registry import Registry
from engine_bridge.policy.adapters.adapter_places import LoadRates, loads
from engine_bridge.policy.nodes.routing import RequestEstimate
from engine_bridge.policy.nodes.session_locations import Homes, doors_of
from engine_bridge.protocol.node import AdapterInfo
from engine_bridge.protocol.node_facts import UNKNOWN, NodeFacts, Ranks

WIDTH, RANK = 1024, 64  # of the module and the adapter that CPU workers are measured with, as in bench/LOG.md
EMPTY_WIDTH, EMPTY_RANK = 64, 8
NUM_WORKERS, MAX_ROWS = 2, 2048
NUM_EMPTY, NUM_DELTAS = 500, 60
NUM_NODES, NUM_ADAPTERS, NUM_DECISIONS = 60, 40_000, 500  # CaraServe §7.5


# -- CPU workers (B2, B3) ----------------------------------------------------------------------------------------------


@contextmanager
def workers(num_workers: int) -> Iterator[Any]:
    """An `AssistPool` with a core for each worker, as far as there are, that is ready and holds adapter 1: an `empty` module and a `usual` one."""
    import torch

    from engine_bridge.driver.assist.pool import AssistPool
    from engine_bridge.driver.lora.lora_weights import pack_slot

    def layer(width: int, rank: int) -> Any:
        return pack_slot([torch.full((rank, width), 0.01)], [torch.full((width, rank), 0.01)], [rank])

    with AssistPool(
        num_workers,
        max_rows=MAX_ROWS,
        max_in=WIDTH,
        max_out=WIDTH,
        weight_bytes=64 << 20,
        cpus=sorted(os.sched_getaffinity(0)),
    ) as pool:
        pool.wait_ready()
        pool.put(1, {"empty": layer(EMPTY_WIDTH, EMPTY_RANK), "usual": layer(WIDTH, RANK)})
        yield pool


def rows_of(num: int, width: int) -> Any:
    import torch

    return torch.ones(num, width)


def handover() -> dict[str, Any]:
    """B2: what a delta of next to nothing takes, and for which part of a usual one the engine's thread waits for the worker."""
    with workers(1) as pool:
        x, y = rows_of(1, EMPTY_WIDTH), rows_of(1, EMPTY_WIDTH)
        empty_s = [timed(lambda: pool.add(1, "empty", y, x, 1.0)) for _ in range(NUM_EMPTY)]
        waited_s: list[float] = []
        wait = pool._team.wait
        pool._team.wait = lambda deadline: waited_s.append(timed(lambda: wait(deadline)))
        x, y = rows_of(256, WIDTH), rows_of(256, WIDTH)
        whole_s = [timed(lambda: pool.add(1, "usual", y, x, 1.0)) for _ in range(NUM_DELTAS)]
    return {
        "empty_ms": round(statistics.median(empty_s) * 1e3, 4),
        "empty_p99_ms": round(quantile(empty_s, 0.99) * 1e3, 4),
        "delta_ms": round(statistics.median(whole_s) * 1e3, 3),
        "blocked_share": round(sum(waited_s) / sum(whole_s), 3),
    }


def cores() -> dict[str, Any]:
    """B3: the rows that one worker takes in a millisecond, and twice as many on one worker, on two, and on torch's own threads."""
    import torch

    from engine_bridge.driver.adapters.host_workers import BUDGET_S
    from engine_bridge.driver.assist.profile import one_worker
    from engine_bridge.driver.assist.shares import ModuleShape, num_workers_for, rows_per_core

    with workers(NUM_WORKERS) as pool:
        with one_worker(pool) as measure:
            per_core = rows_per_core(
                measure, [ModuleShape(WIDTH, RANK, WIDTH)], BUDGET_S, max_rows=MAX_ROWS // 2
            )
        num_rows = NUM_WORKERS * per_core
        x, y = rows_of(num_rows, WIDTH), rows_of(num_rows, WIDTH)
        a, b = torch.full((WIDTH, RANK), 0.01), torch.full((RANK, WIDTH), 0.01)
        torch._C.set_num_threads(NUM_WORKERS)

        def by_workers(rows: int) -> Callable[[], object]:
            def compute() -> None:
                pool.rows_per_core = rows
                pool.add(1, "usual", y, x, 1.0)

            return compute

        ways = {
            "one": by_workers(num_rows),
            "shared": by_workers(per_core),
            "torch": lambda: y.addmm_(torch.mm(x, a), b),
        }
        times = in_turn(ways, NUM_DELTAS)
    one, shared, own = (statistics.median(times[way]) for way in ways)
    return {
        "rows_per_core": per_core,
        "num_rows": num_rows,
        "num_workers": num_workers_for(num_rows, per_core, NUM_WORKERS),
        "ms": {way: round(statistics.median(found) * 1e3, 3) for way, found in times.items()},
        "shared_vs_one": round(shared / one, 3),
        "torch_vs_shared": round(own / shared, 3),
    }


def in_turn(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, one after the other in every repeat; a first round is not counted."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way, run in ways.items():
            seconds = timed(run)
            if repeat:
                found[way].append(seconds)
    return found


def timed(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


# -- the registry (B6) -------------------------------------------------------------------------------------------------


def registry() -> dict[str, Any]:
    """B6: 40,000 adapters: opening the file and reading them all, finding one, and choosing a node of 60 for a request that names one."""
    names = [f"adapter-{number}" for number in range(NUM_ADAPTERS)]
    chance = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="overture-bench-") as folder:
        path = Path(folder) / "adapters.db"
        fill(path, names)
        started_s = time.perf_counter()
        opened = Registry(path)
        records = opened.all_current()
        open_s = time.perf_counter() - started_s
        asked = chance.choices(names, k=NUM_DECISIONS)
        found_s = [timed(lambda name=name: opened.current(name)) for name in asked]
        opened.close()
    served = {
        record.name: AdapterInfo(record.name, record.rank, record.num_bytes, version=record.content_hash)
        for record in records
    }
    decided_s = decide(served, asked)
    return {
        "num_adapters": len(records),
        "open_s": round(open_s, 3),
        "lookup_ms": round(statistics.median(found_s) * 1e3, 4),
        "decision_ms": round(statistics.median(decided_s) * 1e3, 4),
        "decision_p99_ms": round(quantile(decided_s, 0.99) * 1e3, 4),
    }


def fill(path: Path, names: Sequence[str]) -> None:
    """Register adapters without waiting for the disk: what that takes is not in question."""
    filling = Registry(path)
    with filling._use() as connection:
        connection.execute("PRAGMA synchronous = OFF")
    for number, name in enumerate(names):
        filling.register(
            name,
            f"/adapters/{name}",
            content_hash=f"{number:064x}",
            checksum=number,
            signature=str(number),
            rank=(8, 16, 32, 64)[number % 4],
            num_bytes=1 << 20,
            target_modules=("q_proj", "v_proj"),
            base_model=None,
            now=0.0,
        )
    filling.close()


def decide(served: Mapping[str, AdapterInfo], asked: Sequence[str]) -> list[float]:
    """Seconds for each request: where its adapter is, and which node serves it, by the default policy and nodes that are loaded unevenly."""
    chance = random.Random(1)
    nodes = [facts_of(f"node-{number}", chance) for number in range(NUM_NODES)]
    homes = Homes(doors_of("overture", nodes))
    for facts in nodes:
        homes.reported(facts.node_id, facts, 0.0)
    places = [(facts.node_id, served, LoadRates()) for facts in nodes]
    taken_s = []
    for number, name in enumerate(asked):
        started_s = time.perf_counter()
        info = served[name]
        ask = RequestEstimate(
            request_id=f"r{number}",
            num_prompt_tokens=100,
            num_answer_tokens=100,
            rank=info.rank or 0,
            adapter_load_s=loads(name, info.version, places),
            usual_load_s=None,
        )
        sent = homes.requested(("", f"s{number}"), ask, float(number))
        taken_s.append(time.perf_counter() - started_s)
        if sent.node_id is None:
            raise RuntimeError("no node can serve it")
        homes.ended(ask.request_id)
    return taken_s


def facts_of(node_id: str, chance: random.Random) -> NodeFacts:
    """A node with up to 32 requests of ranks 8 to 64."""
    num = chance.randrange(33)
    return NodeFacts(
        node_id=node_id,
        running=Ranks(num, 30 * num, 64 if num else 0),
        queued=Ranks(),
        num_tokens=200 * num,
        queued_tokens=0,
        free_tokens=100_000,
        perf=UNKNOWN,
    )

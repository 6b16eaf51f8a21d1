"""CPU-assist workers: what a signal costs, and a LoRA delta in this process against one and two workers.

    python -m bench.live.assist

Module 1024 x 1024, rank 64, x and y bf16; weights stay in the caches, as in a prefill that comes in chunks. The three ways take turns; a time is
the best of 20 calls, a repeat, and the table has the median and range of 5 repeats. Warm-up: one call each. One torch thread in this process, as in
each worker; worker i is pinned to core i. `direct` is the arithmetic of `engine_bridge.driver.lora_weights` with its copies to fp32 and back.

The last line is JSON. `signal_us`: an empty job there and back. `signal_share`: its median over the time with one worker. `start_us`: until
`start` returns. `floor_us`: the delta's floating-point operations over the best that one core of this machine does in a 256-cube GEMM;
`weights_us`: reading the weights once from memory, in case they are in no cache. `rows_per_core`: c of CaraServe §4.2, the rows that one
worker computes within `budget_ms`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch

from bench.live.lora import read_bandwidth, time_in_turns
from bench.live.report import report, spread
from engine_bridge.driver.assist.pool import AssistPool
from engine_bridge.driver.assist.profile import one_worker
from engine_bridge.driver.assist.shares import Shape, rows_per_core
from engine_bridge.driver.lora_weights import SlotWeights, pack_slot

SHAPE = Shape(num_in=1024, rank=64, num_out=1024)
ROWS = (16, 64, 256)
MAX_ROWS = 2048
REPEATS, INNER = 5, 20
SIGNALS = 5000
BUDGET_S = 1e-3
ADAPTER, MODULE = 1, "o_proj"


def core_flops() -> float:
    """Floating-point operations per second of one thread in an fp32 GEMM that fits its cache (best of 500: each is short, or other jobs cut in)."""
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    best = float("inf")
    for _ in range(500):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * 256**3 / best


def signal_times(pool: AssistPool) -> list[float]:
    """Seconds of each of many empty jobs, there and back."""
    times = []
    for _ in range(SIGNALS + 100):
        start = time.perf_counter()
        pool.ping()
        times.append(time.perf_counter() - start)
    return times[100:]


def direct(weights: SlotWeights, y: torch.Tensor, x: torch.Tensor) -> None:
    y_rows = y.float()
    weights.add_to(y_rows, x.float(), 1.0)
    y.copy_(y_rows)


def by_workers(pool: AssistPool, rows_of_one: int, y: torch.Tensor, x: torch.Tensor) -> None:
    pool.rows_per_core = rows_of_one
    pool.add(ADAPTER, MODULE, y, x, 1.0)


def start_time(pool: AssistPool, rows: int) -> float:
    """Microseconds until `start` returns, one worker, base not given: what a launch of later kernels waits for (best of many)."""
    x, y = torch.randn(rows, SHAPE.num_in).bfloat16(), torch.zeros(rows, SHAPE.num_out).bfloat16()
    pool.rows_per_core = rows
    best = float("inf")
    for _ in range(REPEATS * INNER):
        began = time.perf_counter()
        ticket = pool.start(ADAPTER, MODULE, x, 1.0, SHAPE.num_out)
        best = min(best, time.perf_counter() - began)
        pool.finish(ticket, y)
    return 1e6 * best


def measure_rows(pool: AssistPool, weights: SlotWeights, rows: int) -> dict[str, list[float]]:
    """Milliseconds per way and repeat for one delta of so many rows. Raises RuntimeError if the ways differ in a bit."""
    x = torch.randn(rows, SHAPE.num_in).bfloat16()
    base = torch.randn(rows, SHAPE.num_out).bfloat16()
    ways: dict[str, Callable[..., None]] = {
        "direct": partial(direct, weights),
        "one worker": partial(by_workers, pool, rows),
        "two workers": partial(by_workers, pool, -(-rows // 2)),
    }
    answers = {}
    for name, way in ways.items():
        answers[name] = base.clone()
        way(answers[name], x)
    if not all(torch.equal(answer, answers["direct"]) for answer in answers.values()):
        raise RuntimeError("the workers' bits are not those of this process")
    steps = {name: partial(way, torch.zeros_like(base), x) for name, way in ways.items()}
    return time_in_turns(steps, REPEATS, dict.fromkeys(steps, INNER))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weights = pack_slot(
        [torch.randn(SHAPE.rank, SHAPE.num_in) * 0.05],
        [torch.randn(SHAPE.num_out, SHAPE.rank) * 0.05],
        [SHAPE.rank],
    )
    assert weights is not None
    flops, bandwidth = core_flops(), read_bandwidth()
    began = time.perf_counter()
    with AssistPool(
        2,
        max_rows=MAX_ROWS,
        max_in=SHAPE.num_in,
        max_out=SHAPE.num_out,
        weight_bytes=16 << 20,
        timeout_s=30,
        cpus=sorted(os.sched_getaffinity(0)),
    ) as pool:
        pool.wait_ready()
        ready_s = time.perf_counter() - began
        pool.put(ADAPTER, {MODULE: weights})
        signals = signal_times(pool)
        times = {rows: measure_rows(pool, weights, rows) for rows in ROWS}
        starts = {rows: start_time(pool, rows) for rows in ROWS}
        with one_worker(pool) as measure:
            c = rows_per_core(measure, [SHAPE], BUDGET_S, max_rows=MAX_ROWS)
    show(signals, times, starts, c, ready_s, flops, bandwidth)


def show(
    signals: list[float],
    times: dict[int, dict[str, list[float]]],
    starts: dict[int, float],
    c: int,
    ready_s: float,
    flops: float,
    bandwidth: float,
) -> None:
    """Print the table and the JSON line."""
    signal_us = {"p50": 1e6 * median(signals), "p99": 1e6 * quantiles(signals, n=100)[98]}
    num_weights = SHAPE.rank * (SHAPE.num_in + SHAPE.num_out)
    rows = [("signal, there and back, µs", f"p50 {signal_us['p50']:.1f}, p99 {signal_us['p99']:.1f}", "")]
    result: dict[str, Any] = {"signal_us": {name: round(us, 2) for name, us in signal_us.items()}, "rows": {}}
    for num_rows, ways in times.items():
        floor_us = 2e6 * num_rows * num_weights / flops
        one_us = 1e3 * median(ways["one worker"])
        share = signal_us["p50"] / one_us
        for name, ms in ways.items():
            limit = f"{1e3 * median(ms) / floor_us:.1f} × one core's FLOP/s ({floor_us:.0f} µs)"
            rows.append((f"{num_rows} rows, {name}, µs", spread([1e3 * value for value in ms]), limit))
        rows.append((f"{num_rows} rows, signal's share", f"{share:.0%}", ""))
        rows.append(
            (f"{num_rows} rows, start returns after, µs", f"{starts[num_rows]:.0f}", "copies x as fp32")
        )
        medians = {f"{name.replace(' ', '_')}_us": round(1e3 * median(ms), 1) for name, ms in ways.items()}
        result["rows"][num_rows] = medians | {
            "floor_us": round(floor_us, 1),
            "signal_share": round(share, 3),
            "start_us": round(starts[num_rows], 1),
        }
    floor_c = int(BUDGET_S * flops / (2 * num_weights))
    rows.append((f"rows per core in {1e3 * BUDGET_S:g} ms", str(c), f"at one core's FLOP/s {floor_c}"))
    rows.append(("workers ready after, s", f"{ready_s:.1f}", "they load torch"))
    report(
        "CPU-assist workers, rank 64 in 1024 x 1024",
        rows,
        result
        | {"rows_per_core": c, "budget_ms": 1e3 * BUDGET_S, "rows_per_core_at_peak": floor_c}
        | {"core_gflops": round(flops / 1e9, 1), "bandwidth_gb_s": round(bandwidth / 1e9, 2)}
        | {"weights_us": round(4e6 * num_weights / bandwidth, 1), "ready_s": round(ready_s, 2)},
    )


if __name__ == "__main__":
    main()

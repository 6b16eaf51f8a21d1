"""Copies of KV blocks between device and host: the same calls as in a step that saves or loads, timed for several sizes."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from engine_bridge.driver.in_process import kv_caches_of
from engine_bridge.driver.memory.block_copy import BlockCopier, kv_rows, make_copier
from engine_bridge.driver.profiling.budget import Budget
from engine_bridge.policy.costs.costs import Link
from engine_bridge.settings.profile import CopyProfile
from kvtiers.io.host_pool import HostPool

# The host memory that takes part: several times a processor's caches, so that copies come from memory. Chosen.
REGION_BYTES = 256 << 20
MIN_ROUNDS, MAX_ROUNDS = 5, 60
CEILING_ROUNDS = 5
# One size in this many is held out of the fit. Chosen.
HOLD_OUT_EVERY = 3

Times = Mapping[tuple[int, bool], Sequence[float]]
"""The seconds of each copy, by (blocks, whether out of the device)."""


def measure_copies(engine: Any, budget: Budget) -> CopyProfile:
    """Return the link that fits copies on this machine: one time for the set-up, and bytes per second each way.

    Overwrites KV; nothing may run. Blocks lie anywhere on the device and side by side in host memory, as after a prefill into a device in use
    (kvtiers/io/host_pool.py).
    """
    caches = kv_caches_of(engine)
    layer_bytes = kv_rows(caches[0]).shape[1]
    pool = HostPool(layer_bytes, REGION_BYTES)
    pool.populate(lambda: True)
    copier = make_copier(caches, pool.region, lambda run: run())
    num_blocks = min(caches[0].shape[0] // 2, pool.num_slots // len(caches) // 2)
    timed = _Copies(copier, caches, pool.num_slots)
    sizes = _sizes(num_blocks)
    times = _measure(timed, sizes, budget)
    held_out = set(sizes[1:-1:HOLD_OUT_EVERY])
    block_bytes = layer_bytes * len(caches)
    link = fit_link({key: value for key, value in times.items() if key[0] not in held_out}, block_bytes)
    return CopyProfile(
        link=link,
        swap_error=_swap_error(link, times, held_out or set(sizes), block_bytes),
        repeatability=_repeatability(times),
        ceiling_bytes_per_s=_ceiling(caches, pool),
    )


class _Copies:
    """Times copies that each touch other memory than the last ones."""

    def __init__(self, copier: BlockCopier, caches: Sequence[torch.Tensor], num_slots: int) -> None:
        self._copier = copier
        self._num_layers = len(caches)
        self._num_blocks = caches[0].shape[0]
        self._num_slots = num_slots
        self._is_cuda = caches[0].device.type == "cuda"
        self._chance = random.Random(0)
        self._next_slot = 0

    def seconds(self, num_blocks: int, is_out: bool) -> float:
        """Copy this many blocks out of the device or into it, and return the seconds."""
        blocks = self._chance.sample(range(self._num_blocks), num_blocks)
        if self._next_slot + num_blocks * self._num_layers > self._num_slots:
            self._next_slot = 0
        first = self._next_slot
        self._next_slot += num_blocks * self._num_layers
        copy = self._copier.to_host if is_out else self._copier.to_device
        runs = [
            list(range(first + layer * num_blocks, first + (layer + 1) * num_blocks))
            for layer in range(self._num_layers)
        ]
        self._wait()
        started_s = time.perf_counter()
        for layer, slots in enumerate(runs):
            copy(layer, blocks, slots)
        self._copier.end_step(lambda: None)
        self._wait()
        return time.perf_counter() - started_s

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


def _sizes(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, ... up to `most`."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    between = [3 * power // 2 for power in powers[1:]]
    return sorted({size for size in (*powers, *between, most) if 0 < size <= most})


def _measure(timed: _Copies, sizes: Sequence[int], budget: Budget) -> Times:
    """Time all sizes both ways in random order, round by round. The first round only warms up."""
    times: dict[tuple[int, bool], list[float]] = defaultdict(list)
    order = [(size, is_out) for size in sizes for is_out in (True, False)]
    chance = random.Random(1)
    for number in range(MAX_ROUNDS + 1):
        if number > MIN_ROUNDS and budget.is_over():
            break
        chance.shuffle(order)
        for size, is_out in order:
            budget.say(f"copies: {size} blocks {'out' if is_out else 'in'}")
            seconds = timed.seconds(size, is_out)
            if number:
                times[size, is_out].append(seconds)
    return times


def fit_link(times: Times, block_bytes: int) -> Link:
    """Fit a link by least squares of the relative error over the median time of each size."""
    rows, seconds = [], []
    for (num_blocks, is_out), measured in times.items():
        num_bytes = num_blocks * block_bytes
        rows.append((1.0, num_bytes * is_out, num_bytes * (not is_out)))
        seconds.append(statistics.median(measured))
    setup_s, out_s, in_s = _least_squares(rows, seconds)
    if setup_s < 0:  # no set-up can be seen beside the copies themselves
        setup_s = 0.0
        out_s, in_s = _least_squares([row[1:] for row in rows], seconds)
    return Link(d2h_bytes_per_s=1 / out_s, h2d_bytes_per_s=1 / in_s, setup_s=setup_s)


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    weights = 1 / np.array(seconds)
    scaled = np.array(rows, dtype=np.float64) * weights[:, None]
    units = np.abs(scaled).max(axis=0)  # otherwise bytes and seconds would be of too different a size
    found, *_ = np.linalg.lstsq(scaled / units, np.ones(len(rows)), rcond=None)
    return [float(value) for value in found / units]


def _swap_error(link: Link, times: Times, sizes: set[int], block_bytes: int) -> float:
    """Return the mean relative error of a swap of these numbers of blocks: out and in again."""
    errors = []
    for size in sizes:
        measured = statistics.median(times[size, True]) + statistics.median(times[size, False])
        predicted = link.out_s(size * block_bytes) + link.in_s(size * block_bytes)
        errors.append(abs(predicted / measured - 1))
    return statistics.fmean(errors)


def _repeatability(times: Times) -> float:
    return statistics.fmean(
        abs(seconds / statistics.median(measured) - 1) for measured in times.values() for seconds in measured
    )


def _ceiling(caches: Sequence[torch.Tensor], pool: HostPool) -> float:
    """Return the bytes per second of plain copies of one stretch, from the device's memory to the host's."""
    source = kv_rows(caches[0])
    num_bytes = min(source.numel(), pool.region.nbytes)
    into = torch.from_numpy(pool.region).view(-1)[:num_bytes]
    is_cuda = source.device.type == "cuda"

    def copy_s(part: torch.Tensor) -> float:
        """Copy a stretch and return the seconds."""
        started_s = time.perf_counter()
        into.copy_(part)
        if is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started_s

    # Each round copies another layer, so that none is found in the processor's caches.
    layers = [
        kv_rows(caches[number % len(caches)]).reshape(-1)[:num_bytes] for number in range(CEILING_ROUNDS)
    ]
    return num_bytes / statistics.median(copy_s(layer) for layer in layers)

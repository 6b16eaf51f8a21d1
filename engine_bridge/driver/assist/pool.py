"""LoRA deltas from worker processes: weights, activations and results in shared memory, signals by eventfd.

Use: `put` an adapter's weights, then `add` per layer and module. A caller that gets AssistLost computes the delta itself.

Threads: `add` belongs to one thread (the engine's), `put` and `drop` to one other (a loader's) or the same.

Needs Linux 5.3 (memfd, eventfd, pidfd).

Source: CaraServe §4.2, shared memory data transfer and profiling-guided parallelization. Departs in that the copy of x to shared memory is the
caller's (the paper's device kernel does it).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import torch

from engine_bridge.driver.assist.allocator import FirstFitAllocator, align
from engine_bridge.driver.assist.layout import FLOAT_BYTES, Job, mailboxes_bytes, matrix, memory_file
from engine_bridge.driver.assist.shares import num_workers_for, split_rows
from engine_bridge.driver.assist.store import Module, WeightsRegion, described, layer_bytes
from engine_bridge.driver.assist.team import AssistLost, Team
from engine_bridge.driver.lora.lora_weights import SlotWeights

# A delta takes milliseconds; a worker that has not answered by then will not, or the machine has no time for it (chosen).
TIMEOUT_S = 1.0
# Loading torch takes 4 s of a core where Python may not keep its compiled files (measured); several workers and an engine may load at once (chosen).
START_TIMEOUT_S = 60.0
# The rows of one worker until a profile has measured them: about a millisecond of a rank-64 adapter in a 1024 x 1024 module (measured, two-core AMD
# EPYC).
ROWS_PER_CORE = 256


class AssistPool:
    """Workers and the memory they share with this process.

    The constructor starts the workers and returns; they load torch for some seconds, until then `is_alive` is False (`wait_ready` waits).

    Args:
        num_workers: processes, each with one computing thread.
        max_rows: the most rows of one `add`. The memory for activations and results holds this many rows of the widest module; all of it is touched
            at the start, by the workers.
        max_in, max_out: the widest module.
        weight_bytes: bound of the adapters' memory, which is taken as adapters come; memory freed by `drop` is used again but not given back.
        rows_per_core: rows that one worker computes within its time; see `shares`. May be set later.
        timeout_s: how long `add` waits.
        cpus: worker i runs on `cpus[i % len(cpus)]` only. Without it workers may run where the calling thread may, and the kernel may put two of them
            on one core for a while (measured on two busy cores, 256 rows of rank 64: best time of two workers 600 µs pinned, 1,060 not). An engine
            that binds its threads to cores should name other cores here: a worker beside one of those threads slows every step.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        max_rows: int,
        max_in: int,
        max_out: int,
        weight_bytes: int,
        rows_per_core: int = ROWS_PER_CORE,
        timeout_s: float = TIMEOUT_S,
        cpus: Sequence[int] | None = None,
    ) -> None:
        self.num_workers, self.max_rows, self.max_in, self.max_out = num_workers, max_rows, max_in, max_out
        self.rows_per_core, self._timeout_s = rows_per_core, timeout_s
        self._is_lost = self._is_closed = self._was_ready = False
        self._room = FirstFitAllocator(weight_bytes)
        # Each adapter's offset in the weights region, and its layers there. The lock is held while workers read.
        self._adapters: dict[int, tuple[int, dict[str, Module]]] = {}
        self._lock = threading.Lock()
        x_bytes, y_bytes = (align(max_rows * width * FLOAT_BYTES) for width in (max_in, max_out))
        self._x_start = mailboxes_bytes(num_workers)
        self._results_start = self._x_start + x_bytes
        weights_fd = memory_file("overture-assist-weights", weight_bytes)
        jobs_fd = memory_file("overture-assist-jobs", self._results_start + y_bytes)
        try:  # the mappings outlive the descriptors, here and in the workers
            self._weights = WeightsRegion(mmap.mmap(weights_fd, 0))
            jobs = mmap.mmap(jobs_fd, 0)
            self._jobs = torch.frombuffer(jobs, dtype=torch.float32)
            self._team = Team(num_workers, memoryview(jobs), {"weights": weights_fd, "jobs": jobs_fd}, cpus)
        finally:
            os.close(weights_fd)
            os.close(jobs_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, also hung ones, and free the memory. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._team.close()
        # A mapping ends with the last tensor or view on it; until then mmap.close() would refuse.
        self._adapters = {}
        del self._weights, self._jobs

    # --- state ---------------------------------------------------------------------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return self._team.pids

    @property
    def is_alive(self) -> bool:
        """Whether all workers are ready and none is lost. From any thread. Once True, False is final."""
        if self._is_closed or self._is_lost:
            return False
        self._is_lost = self._team.has_lost_one
        self._was_ready = self._was_ready or self._team.is_ready
        return self._was_ready and not self._is_lost

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until all workers can compute. Raises AssistLost if one ends or the time does; after the latter the caller may wait again."""
        self._check_usable()
        self._team.wait_ready(time.monotonic() + timeout_s)
        self._was_ready = True

    # --- adapters ------------------------------------------------------------------------------------------------------------------

    def put(self, adapter_id: int, weights: Mapping[str, SlotWeights]) -> bool:
        """Copy an adapter's weights, by module, into the shared memory, as fp32. False if there is no room: nothing has changed.

        Raises ValueError if the adapter is there already (drop it first) or a module does not fit the pool's widths, AssistLost if the pool
        is closed.
        """
        if self._is_closed:
            raise AssistLost("the assist pool is closed")
        for name, layer in weights.items():
            module = described(0, layer)
            if module.least_in > self.max_in or module.least_out > self.max_out:
                raise ValueError(f"module {name} is wider than the assist pool")
        with self._lock:
            if adapter_id in self._adapters:
                raise ValueError(f"adapter {adapter_id} is in the assist pool already")
            offset = self._room.allocate(sum(map(layer_bytes, weights.values())))
        if offset is None:
            return False
        at, modules = offset, {}
        for name, layer in weights.items():
            modules[name] = self._weights.write(at, layer)
            at += layer_bytes(layer)
        with self._lock:
            self._adapters[adapter_id] = offset, modules
        return True

    def drop(self, adapter_id: int) -> None:
        """Forget an adapter, if it is there. Waits for the delta that is being computed."""
        with self._lock:
            if adapter_id in self._adapters:
                self._room.free(self._adapters.pop(adapter_id)[0])

    def holds(self, adapter_id: int) -> bool:
        """Return whether the CPU workers have this adapter's weights."""
        return adapter_id in self._adapters

    def has_module(self, adapter_id: int, module: str) -> bool:
        """Return whether `add` may be called for this module: an adapter may leave modules alone."""
        _, modules = self._adapters.get(adapter_id, (0, {}))
        return module in modules

    # --- deltas --------------------------------------------------------------------------------------------------------------------

    def add(self, adapter_id: int, module: str, y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        """Add `scale · x · A · B` to `y`, in place and in fp32, rounded to the type of `y` once.

        The rows go to ceil(L / rows_per_core) workers in equal parts. Each is woken as soon as its rows are copied. The bits are those of
        `lora.SlotWeights.add_to` on an fp32 copy of `y` with one thread; how the rows are split among workers changes none.

        Args:
            adapter_id: the adapter.
            module: the layer's name.
            y: `[L, out]`, the base output.
            x: `[L, in]`, any float type, one row or more. For a layer without A: A's rows for the tokens.
            scale: a factor for the delta.

        Raises:
            AssistLost: at once if a worker has ended, or if the workers did not answer in time; then `y` is unchanged, and the pool is of no more
                use.
            KeyError: if the pool does not hold this module of the adapter.
            ValueError: for a shape that does not fit.
        """
        self._check_usable()
        if not self._was_ready and not self.is_alive:
            raise AssistLost("the assist workers are not ready")
        with self._lock:
            place = self._adapters[adapter_id][1][module]
            self._check_shape(place, x, y)
            self._give_out(place, x, y, scale)
            try:
                self._team.wait(time.monotonic() + self._timeout_s)
            except AssistLost:
                self._is_lost = True
                raise
        y.copy_(matrix(self._jobs, self._results_start, *y.shape))

    def _check_usable(self) -> None:
        if self._is_closed or self._is_lost:
            raise AssistLost("the assist pool is closed" if self._is_closed else "an assist worker is lost")

    def _check_shape(self, place: Module, x: torch.Tensor, y: torch.Tensor) -> None:
        (num_rows, num_in), num_out = x.shape, y.size(1)
        least_in, most_in = (place.num_in, place.num_in) if place.num_in else (place.least_in, self.max_in)
        if not 1 <= num_rows <= self.max_rows or y.size(0) != num_rows:
            raise ValueError(
                f"{num_rows} rows to add to {y.size(0)}; the assist pool takes 1 to {self.max_rows}"
            )
        if not least_in <= num_in <= most_in or not place.least_out <= num_out <= self.max_out:
            raise ValueError(
                f"a module {num_in} wide in and {num_out} out does not fit the adapter's weights"
            )

    def _give_out(self, place: Module, x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
        """Copy the rows, part by part, and wake a worker for each part."""
        num_in, num_out = x.size(1), y.size(1)
        parts = split_rows(x.size(0), num_workers_for(x.size(0), self.rows_per_core, self.num_workers))
        for worker, (first, last) in enumerate(parts):
            x_at = self._x_start + first * num_in * FLOAT_BYTES
            y_at = self._results_start + first * num_out * FLOAT_BYTES
            matrix(self._jobs, x_at, last - first, num_in).copy_(x[first:last])
            matrix(self._jobs, y_at, last - first, num_out).copy_(y[first:last])
            self._team.give(worker, Job(place.head, x_at, y_at, last - first, num_in, num_out, scale))

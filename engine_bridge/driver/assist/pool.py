"""LoRA deltas from worker processes: weights, activations and results in shared memory, signals by eventfd.

Use: `put` an adapter's weights, then per layer and module `start` (returns at once; the base output may be computed meanwhile) and `finish`.
The caller of `start` or `finish` that gets AssistLost or AssistBusy computes the delta itself.

Threads: `start`, `finish`, `discard` and `add` belong to one thread (the engine's), `put` and `drop` to one other (a loader's) or the same.

Needs Linux 5.3 (memfd, eventfd, pidfd).

Source: CaraServe §4.2, shared memory data transfer and profiling-guided parallelization. Departs in that the copy of x to shared memory is the
caller's (the paper's device kernel does it).
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from engine_bridge.driver.assist.allocator import FirstFit, align
from engine_bridge.driver.assist.errors import AssistBusy, AssistLost
from engine_bridge.driver.assist.layout import FLOAT_BYTES, Job, mailboxes_bytes, memory_file
from engine_bridge.driver.assist.shares import num_workers_for, split_rows
from engine_bridge.driver.assist.store import Adapter, LayerWeights, Module, WeightStore
from engine_bridge.driver.assist.team import Team
from engine_bridge.driver.gemm import MIN_ROWS

# A delta takes milliseconds; a worker that has not answered by then will not, or the machine has no time for it (chosen).
TIMEOUT_S = 1.0
# Loading torch takes 4 s of a core where Python may not keep its compiled files (measured); several workers and an engine may load at once (chosen).
START_TIMEOUT_S = 60.0
# Until a profile says better: about a millisecond of a rank-64 adapter in a 1024 x 1024 module (measured, two-core AMD EPYC).
ROWS_PER_CORE = 256


@dataclass(frozen=True, slots=True)
class Ticket:
    """A delta that is being computed. Give it to `finish` or `discard`, once: it holds shared memory.

    Attributes:
        offset: of its stretch behind the mailboxes.
        results: byte offset of the results in the jobs region; the first `num_rows` of them are wanted, few rows were filled up.
        has_base: the workers add to the base output, so the results are the sum.
        jobs: `(worker, number of its job)`.
    """

    adapter: Adapter
    offset: int
    results: int
    num_rows: int
    num_out: int
    has_base: bool
    jobs: tuple[tuple[int, int], ...]


class AssistPool:
    """Workers and the memory they share with this process.

    The constructor starts the workers and returns; they load torch for some seconds, until then `is_alive` is False (`wait_ready` waits).

    Args:
        num_workers: processes, each with one computing thread.
        max_rows: rows of one `start`. The memory for activations and results holds so many rows of the widest module, in one ticket or
            several; all of it is touched at the start, by the workers.
        max_in, max_out: the widest module.
        weight_bytes: bound of the adapters' memory, which is taken as adapters come; what `drop` frees is used again but not given back.
        rows_per_core: rows that one worker computes within its time; see `shares`. May be set later.
        timeout_s: how long `finish` waits.
        cpus: worker i runs on `cpus[i % len(cpus)]` only. Without it workers may run where the calling thread may, and the kernel may put two
            of them on one core for a while (measured on two busy cores, 256 rows of rank 64: best time of two workers 600 µs pinned,
            1,060 not). An engine that binds its threads to cores should name others here: a worker beside one of them slows every step.
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
        if min(num_workers, max_rows, max_in, max_out) < 1:
            raise ValueError("an assist pool needs workers, rows and columns")
        self.num_workers, self.max_rows, self.max_in, self.max_out = num_workers, max_rows, max_in, max_out
        self.rows_per_core, self._timeout_s = rows_per_core, timeout_s
        self._is_lost = self._is_closed = self._was_ready = False
        self._open: dict[int, Ticket] = {}  # in flight, by offset
        self._jobs_start = mailboxes_bytes(num_workers)
        jobs_bytes = sum(align(max(max_rows, MIN_ROWS) * width * FLOAT_BYTES) for width in (max_in, max_out))
        self._room = FirstFit(jobs_bytes)
        weights_fd = memory_file("overture-assist-weights", weight_bytes)
        jobs_fd = memory_file("overture-assist-jobs", self._jobs_start + jobs_bytes)
        try:  # the mappings outlive the descriptors, here and in the workers
            self._store = WeightStore(mmap.mmap(weights_fd, 0), weight_bytes, max_in, max_out)
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
        # A mapping goes with the last tensor or view on it; until then mmap.close() would refuse.
        del self._store, self._jobs

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
        """Wait until all workers can compute. Raises AssistLost if one ends or the time does; after the latter one may wait again."""
        self._check_usable()
        self._team.wait_ready(time.monotonic() + timeout_s)
        self._was_ready = True

    # --- adapters ------------------------------------------------------------------------------------------------------------------

    def put(self, adapter_id: int, weights: Mapping[str, LayerWeights]) -> bool:
        """Copy an adapter's weights, by module, into the shared memory, as fp32. False if there is no room: nothing has changed.

        Raises ValueError if the adapter is there already (drop it first) or a module does not fit the pool's widths, AssistLost if the pool
        is closed.
        """
        if self._is_closed:
            raise AssistLost("the assist pool is closed")
        return self._store.put(adapter_id, weights)

    def drop(self, adapter_id: int) -> None:
        """Forget an adapter, if it is there. Its memory is free once the tickets that use it are finished."""
        if not self._is_closed:
            self._store.drop(adapter_id)

    def holds(self, adapter_id: int) -> bool:
        return not self._is_closed and self._store.find(adapter_id) is not None

    def has_module(self, adapter_id: int, module: str) -> bool:
        """Whether `start` may be called for it: an adapter may leave modules alone."""
        adapter = None if self._is_closed else self._store.find(adapter_id)
        return adapter is not None and module in adapter.modules

    @property
    def free_weight_bytes(self) -> int:
        """Free in the weights region in all; the largest adapter that fits may be smaller."""
        return self._store.free_bytes

    # --- deltas --------------------------------------------------------------------------------------------------------------------

    def start(
        self,
        adapter_id: int,
        module: str,
        x: torch.Tensor,
        scale: float,
        out_features: int,
        base: torch.Tensor | None = None,
    ) -> Ticket:
        """Let workers compute `scale · x · A · B` and return at once.

        Args:
            x: `[L, in]`, any float type, one row or more; copied, and free for other use afterwards. For a layer without A: A's rows for
                the tokens.
            out_features: the module's width, `y.size(1)` in `finish`.
            base: `[L, out_features]`, the `y` of `finish`, if it is known already: the workers add to a copy of it. For the bits see there.

        Its rows go to ceil(L / rows_per_core) workers in equal parts, those with the least before them. Each is woken as soon as its rows
        are copied.

        Raises AssistLost, AssistBusy; KeyError if the pool does not hold this module of the adapter; ValueError for a shape that does not fit.
        """
        self._check_usable()
        if not self._was_ready and not self.is_alive:
            raise AssistLost("the assist workers are not ready")
        adapter, place = self._store.borrow(adapter_id, module)
        try:
            self._check_shape(place, x, out_features, base)
            ticket = self._give_out(adapter, place, x, scale, out_features, base)
        except BaseException:
            self._store.give_back(adapter)
            raise
        self._open[ticket.offset] = ticket
        return ticket

    def finish(self, ticket: Ticket, y: torch.Tensor) -> None:
        """Wait for the delta and add it to `y`, `[L, out_features]`, in fp32, rounded to the type of `y` once.

        The bits are those of `lora.SlotWeights.add_to` on fp32 copies of `y` with one thread: always if `start` was given `y` as base,
        otherwise up to rank 192 (of a fused layer in one block-diagonal matrix: the sum of the ranks). Beyond that MKL adds to `y` once per
        192 ranks, and `y` plus the whole delta may differ in the last fp32 bit (measured, AMD EPYC with AVX-512). How the rows are split
        among workers changes no bit.

        Raises AssistLost at once if a worker has ended, or if they did not answer in time; then `y` is as it was, and the pool is of no
        more use.
        """
        if tuple(y.shape) != (ticket.num_rows, ticket.num_out):
            raise ValueError(f"y is {tuple(y.shape)}, the delta {(ticket.num_rows, ticket.num_out)}")
        self._wait(ticket)
        results = self._view(ticket.results, ticket.num_rows, ticket.num_out)
        if ticket.has_base:
            y.copy_(results)
        elif y.dtype == torch.float32:
            y.add_(results)
        else:
            y.copy_(y.float().add_(results))
        self._end(ticket)

    def discard(self, ticket: Ticket) -> None:
        """Wait for the delta and throw it away: its request has gone. Raises AssistLost as `finish` does."""
        self._wait(ticket)
        self._end(ticket)

    def add(self, adapter_id: int, module: str, y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        """Add the delta for rows `x` to rows `y`, in place: `start` with base, and `finish`."""
        self.finish(self.start(adapter_id, module, x, scale, y.size(1), base=y), y)

    def _check_usable(self) -> None:
        if self._is_closed or self._is_lost:
            raise AssistLost("the assist pool is closed" if self._is_closed else "an assist worker is lost")

    def _check_shape(self, place: Module, x: torch.Tensor, num_out: int, base: torch.Tensor | None) -> None:
        num_rows, num_in = x.shape
        least_in, most_in = (place.num_in, place.num_in) if place.num_in else (place.least_in, self.max_in)
        if not 1 <= num_rows <= self.max_rows:
            raise ValueError(f"{num_rows} rows; the assist pool takes 1 to {self.max_rows}")
        if not least_in <= num_in <= most_in or not place.least_out <= num_out <= self.max_out:
            raise ValueError(
                f"a module {num_in} wide in and {num_out} out does not fit the adapter's weights"
            )
        if base is not None and tuple(base.shape) != (num_rows, num_out):
            raise ValueError(f"base is {tuple(base.shape)}, the delta {(num_rows, num_out)}")

    def _give_out(
        self,
        adapter: Adapter,
        place: Module,
        x: torch.Tensor,
        scale: float,
        num_out: int,
        base: torch.Tensor | None,
    ) -> Ticket:
        """Copy the rows, part by part, and wake a worker for each."""
        num_rows, num_in = x.shape
        filled = max(num_rows, MIN_ROWS)
        parts = split_rows(filled, num_workers_for(filled, self.rows_per_core, self.num_workers))
        workers = self._team.idlest(len(parts))
        x_bytes, y_bytes = (align(filled * width * FLOAT_BYTES) for width in (num_in, num_out))
        offset = self._room.allocate(x_bytes + y_bytes)
        if offset is None:
            raise AssistBusy("no room for another delta in flight")
        x_at = self._jobs_start + offset
        results = x_at + x_bytes
        jobs = []
        for worker, (first, last) in zip(workers, parts, strict=True):
            x_part, y_part = x_at + first * num_in * FLOAT_BYTES, results + first * num_out * FLOAT_BYTES
            self._copy_in(x_part, x[first:last], last - first)
            if base is not None:
                self._copy_in(y_part, base[first:last], last - first)
            job = Job(place.head, x_part, y_part, last - first, num_in, num_out, int(base is None), scale)
            jobs.append((worker, self._team.give(worker, job)))
        return Ticket(adapter, offset, results, num_rows, num_out, base is not None, tuple(jobs))

    def _copy_in(self, offset: int, rows: torch.Tensor, filled: int) -> None:
        """Copy rows into the jobs region as fp32; where they are few, repeat the last one as `lora.plan_rows` does."""
        target = self._view(offset, filled, rows.size(1))
        target[: rows.size(0)].copy_(rows)
        if rows.size(0) < filled:
            target[rows.size(0) :].copy_(target[rows.size(0) - 1])

    def _wait(self, ticket: Ticket) -> None:
        self._check_usable()
        if self._open.get(ticket.offset) is not ticket:
            raise ValueError("this ticket was finished or discarded before")
        self._wait_for(ticket.jobs)

    def _wait_for(self, jobs: Sequence[tuple[int, int]]) -> None:
        deadline = time.monotonic() + self._timeout_s
        try:
            for worker, number in jobs:
                self._team.wait_for_job(worker, number, deadline)
        except AssistLost:
            self._is_lost = True
            raise

    def _end(self, ticket: Ticket) -> None:
        del self._open[ticket.offset]
        self._room.free(ticket.offset)
        self._store.give_back(ticket.adapter)

    def _view(self, offset: int, num_rows: int, num_columns: int) -> torch.Tensor:
        """A row-major matrix at a byte offset of the jobs region."""
        return self._jobs.as_strided((num_rows, num_columns), (num_columns, 1), offset // FLOAT_BYTES)

"""The worker processes: starting, waking, waiting for and ending them. Knows nothing of adapters or tensors."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine_bridge.driver.assist.layout import Job, mailboxes

ROOT = Path(__file__).resolve().parents[3]


class AssistLost(RuntimeError):
    """The workers cannot help: one has ended, did not answer in time or is not ready yet, or the pool is closed.

    This is no error of the request: its delta is computed in the engine's process instead.
    """


class Team:
    """One process per worker, each with a mailbox.

    Waiting is one poll of the eventfd that all workers ring and of their pidfds: a worker's end is noticed at once. All but `has_lost_one` belong to
    one thread.

    Args:
        jobs: the jobs region, as bytes.
        fds: file descriptors of the two regions, by the name of the worker's argument. The caller keeps owning them.
        cpus: see `AssistPool`.
    """

    def __init__(
        self, num_workers: int, jobs: memoryview, fds: Mapping[str, int], cpus: Sequence[int] | None
    ) -> None:
        self._mailboxes = mailboxes(jobs, num_workers)
        self._num_given = [0] * num_workers
        self._bells = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(num_workers)]
        self._done = os.eventfd(0, os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._done, select.POLLIN)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._worker_of: dict[int, int] = {}  # by pidfd
        try:
            for worker in range(num_workers):
                self._start(worker, fds, cpus[worker % len(cpus)] if cpus else None)
        except BaseException:
            self.close()
            raise

    def _start(self, worker: int, regions: Mapping[str, int], cpu: int | None) -> None:
        fds = {**regions, "bell": self._bells[worker], "done": self._done}
        numbers = {"parent": os.getpid(), "worker": worker, "num-workers": len(self._bells), **fds}
        if cpu is not None:
            numbers["cpu"] = cpu
        command = [sys.executable, "-P", "-m", "engine_bridge.driver.assist.worker"]
        command += [f"--{name}={number}" for name, number in numbers.items()]
        if threading.current_thread() is threading.main_thread():
            command.append("--main-thread")
        process = subprocess.Popen(
            command,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=tuple(fds.values()),
        )
        self._processes.append(process)
        pidfd = os.pidfd_open(process.pid)
        self._worker_of[pidfd] = worker
        self._poller.register(pidfd, select.POLLIN)

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return tuple(process.pid for process in self._processes)

    @property
    def is_ready(self) -> bool:
        """Whether all workers have loaded torch."""
        return all(mailbox.is_ready for mailbox in self._mailboxes)

    @property
    def has_lost_one(self) -> bool:
        """Whether a worker has ended. Asks the kernel."""
        return any(process.poll() is not None for process in self._processes)

    def give(self, worker: int, job: Job) -> None:
        """Give a job to a worker that has done all its earlier ones, and wake it."""
        self._mailboxes[worker].write(job)
        self._num_given[worker] += 1
        os.eventfd_write(self._bells[worker], 1)

    def wait(self, deadline: float) -> None:
        """Block until all jobs are done. Raises AssistLost when a worker ends, or at `deadline` (monotonic)."""
        while any(box.num_done < num for box, num in zip(self._mailboxes, self._num_given, strict=True)):
            self._wait_for_news(deadline)

    def wait_ready(self, deadline: float) -> None:
        """Block until all workers are ready. Raises AssistLost as `wait` does."""
        while not self.is_ready:
            self._wait_for_news(deadline)

    def _wait_for_news(self, deadline: float) -> None:
        news = self._poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not news:
            raise AssistLost("the assist workers did not answer in time")
        for fd, _ in news:
            if fd != self._done:
                raise AssistLost(f"assist worker {self._processes[self._worker_of[fd]].pid} has ended")
        os.eventfd_read(self._done)

    def close(self) -> None:
        """End all workers, also stopped ones. They hold nothing worth saving: they are killed."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for fd in (*self._bells, *self._worker_of, self._done):
            os.close(fd)
        self._mailboxes = []


def _environment() -> dict[str, str]:
    """Return the parent's environment without the variables that bind an engine's threads to cores or show its GPU.

    Variables that choose MKL's kernels stay: the bits depend on them.
    """
    bound = ("OMP_", "KMP_", "GOMP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(bound)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    return kept | own

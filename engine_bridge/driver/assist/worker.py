"""The program of a worker process: wait for a signal, compute the jobs in the mailbox, say so. One thread computes.

Started by `AssistPool` as `python -m engine_bridge.driver.assist.worker`, with file descriptors and numbers as arguments: a fresh interpreter, so it
shares no lock or CUDA context with the engine, and unlike multiprocessing's spawn does not import the parent's main module again.

An error ends the process with its traceback; the parent sees the end and continues without the pool.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import mmap
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine_bridge.driver.assist.layout import (
    EXPAND_WORDS,
    HEAD_WORDS,
    WORD_BYTES,
    Job,
    mailboxes,
    matrix,
)

if TYPE_CHECKING:
    import torch

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent: int, is_main_thread: bool) -> None:
    """End this process when process `parent` ends, however that happens.

    A thread waits for the parent's pidfd. The kernel's own PR_SET_PDEATHSIG also ends a worker that has been stopped or hangs in native code, but its
    "parent" is the *thread* that started us: it is used only where that is the parent's main thread, or a loader thread's end would take us along.
    """
    watch = os.pidfd_open(parent)
    if is_main_thread:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before we looked; its number may be reused by now
        os._exit(0)

    def wait() -> None:
        """End this process when the parent's pidfd becomes readable."""
        poller = select.poll()
        poller.register(watch, select.POLLIN)
        poller.poll()
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def compute(job: Job, words: memoryview, weights: torch.Tensor, jobs: torch.Tensor) -> None:
    """Add one job's delta to its results.

    words: the weights region as int64, for the layer's head. weights, jobs: the regions as flat fp32 tensors.
    """
    from engine_bridge.driver.lora.lora_weights import Expand, SlotWeights

    head = job.layer // WORD_BYTES
    num_in, total_rank, a, num_expands = words[head : head + HEAD_WORDS]
    expands = []
    for i in range(num_expands):
        at = head + HEAD_WORDS + i * EXPAND_WORDS
        low, high, left, right, b = words[at : at + EXPAND_WORDS]
        expands.append(Expand(low, high, left, right, matrix(weights, b, high - low, right - left)))
    layer = SlotWeights(
        matrix(weights, a, num_in, total_rank) if total_rank else None, tuple(expands), weights
    )
    x = matrix(jobs, job.x, job.num_rows, job.num_in)
    layer.add_to(matrix(jobs, job.results, job.num_rows, job.num_out), x, job.scale)


def flat(region: mmap.mmap) -> torch.Tensor:
    """View the region as a flat fp32 tensor, without a copy."""
    import torch

    with warnings.catch_warnings():
        # We map the weights read-only, so that no fault of ours can change them. torch has no such tensors and says so; we only read.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(region, dtype=torch.float32)


def serve(arguments: argparse.Namespace) -> None:
    """Compute jobs until killed."""
    import torch

    importlib.import_module(
        "engine_bridge.driver.lora.lora_weights"
    )  # for `compute`: not within the first request's time

    torch.set_num_threads(1)
    weights = mmap.mmap(arguments.weights, 0, prot=mmap.PROT_READ)
    # The pages are touched now: their first touch would otherwise fall into a request's time.
    jobs = mmap.mmap(arguments.jobs, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    words = memoryview(weights).cast("q")
    mailbox = mailboxes(memoryview(jobs), arguments.num_workers)[arguments.worker]
    weights_f32, jobs_f32 = flat(weights), flat(jobs)
    mailbox.tell(0)
    os.eventfd_write(arguments.done, 1)
    with torch.inference_mode():
        while True:
            os.eventfd_read(arguments.bell)
            compute(mailbox.read(), words, weights_f32, jobs_f32)
            mailbox.tell(mailbox.num_done + 1)
            os.eventfd_write(arguments.done, 1)


def main(argv: Sequence[str]) -> None:
    """Run a worker with these command-line arguments, until it is killed."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C in a terminal reaches the whole group; the parent decides how to react
    parser = argparse.ArgumentParser()
    for name in ("parent", "worker", "num-workers", "weights", "jobs", "bell", "done"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--cpu", type=int)
    parser.add_argument("--main-thread", action="store_true")
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent, arguments.main_thread)
    # A woken worker of the usual scheduling class takes the core of the thread that woke it, while the engine is still giving out jobs: measured on
    # two busy cores, that took 150 to 5,000 µs at the 95th percentile, with SCHED_BATCH 60 to 300, and the delta was there no later.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if arguments.cpu is not None:
        os.sched_setaffinity(0, {arguments.cpu})
    serve(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])

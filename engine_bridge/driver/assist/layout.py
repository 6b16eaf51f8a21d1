"""Where in the shared memory what lies: both sides read and write plain numbers there, nothing is serialised (no torch here).

The weights region holds adapters. A layer begins with a head of int64: `num_in, total_rank, a, num_expands`, then for each expand
`low, high, left, right, b`; `a` and `b` are the byte offsets of row-major fp32 matrices in the same region, `total_rank` is 0 for a layer
without A.

The jobs region begins with a mailbox per worker: one cache line of state that the worker writes, then a ring of records that the parent
writes. Behind the mailboxes lie the activations and results of the jobs in flight.

Ordering: whoever writes here rings an eventfd afterwards, and whoever reads has read the eventfd before; the kernel's lock on it orders the two.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Final, NamedTuple

WORD_BYTES: Final = 8
FLOAT_BYTES: Final = 4
LINE_WORDS: Final = 8

# Jobs that one worker may have before it. A step starts one per adapter and layer and finishes it before the next layer, so 64 are more cold
# adapters than a step can hold (chosen).
RING_JOBS: Final = 64
JOB_WORDS: Final = LINE_WORDS
MAILBOX_WORDS: Final = LINE_WORDS + RING_JOBS * JOB_WORDS

HEAD_WORDS: Final = 4
EXPAND_WORDS: Final = 5


def head_bytes(num_expands: int) -> int:
    """Size of a layer's head."""
    return WORD_BYTES * (HEAD_WORDS + EXPAND_WORDS * num_expands)


def mailboxes_bytes(num_workers: int) -> int:
    """Size of all mailboxes; a multiple of a cache line."""
    return WORD_BYTES * MAILBOX_WORDS * num_workers


class Job(NamedTuple):
    """`results += scale · x · A · B` for `num_rows` rows; none is a bare signal.

    `layer` is the head's byte offset in the weights region; `x` and `results` are byte offsets in the jobs region of row-major fp32 matrices
    `[num_rows, num_in]` and `[num_rows, num_out]`. Unless `is_zeroed` (1: the worker zeroes the results first) the parent has put the base output
    there.
    """

    layer: int
    x: int
    results: int
    num_rows: int
    num_in: int
    num_out: int
    is_zeroed: int
    scale: float


NO_JOB = Job(0, 0, 0, 0, 0, 0, 0, 1.0)


@dataclass(frozen=True, slots=True)
class Mailbox:
    """One worker's mailbox. Jobs are numbered from 0; `num_done` and `is_ready` belong to the worker, the records to the parent.

    Args:
        words, doubles: the jobs region as int64 and as float64.
        start: the mailbox's first word.
    """

    words: memoryview
    doubles: memoryview[float]
    start: int

    @property
    def num_done(self) -> int:
        """How many jobs the worker has done."""
        return int(self.words[self.start])

    def set_num_done(self, value: int) -> None:
        self.words[self.start] = value

    @property
    def is_ready(self) -> bool:
        """Whether the worker has loaded torch and waits for jobs."""
        return bool(self.words[self.start + 1])

    def set_ready(self) -> None:
        self.words[self.start + 1] = 1

    def write(self, number: int, job: Job) -> None:
        """Put job `number` where `read` finds it. The caller makes sure that the record before it in the ring is done."""
        at = self._record(number)
        for i, word in enumerate(job[:-1], start=at):
            self.words[i] = word
        self.doubles[at + JOB_WORDS - 1] = job.scale

    def read(self, number: int) -> Job:
        at = self._record(number)
        return Job._make([*self.words[at : at + JOB_WORDS - 1], self.doubles[at + JOB_WORDS - 1]])

    def _record(self, number: int) -> int:
        return self.start + LINE_WORDS + number % RING_JOBS * JOB_WORDS


def mailboxes(region: memoryview, num_workers: int) -> list[Mailbox]:
    """The mailboxes at the beginning of the jobs region (a byte view of it, writable)."""
    head = region[: mailboxes_bytes(num_workers)]
    words, doubles = head.cast("q"), head.cast("d")
    return [Mailbox(words, doubles, worker * MAILBOX_WORDS) for worker in range(num_workers)]


def memory_file(name: str, num_bytes: int) -> int:
    """Make anonymous shared memory of at least so many bytes, whole pages, and return its file descriptor.

    A memfd has no name in /dev/shm: the kernel frees it with its last descriptor and mapping, however its owners end. `multiprocessing.shared_memory`
    needs a tracker process for that, and leaves the segment behind when both are killed.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE)
    return fd

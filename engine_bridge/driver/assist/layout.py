"""The layout of the shared memory: both sides read and write plain numbers there, nothing is serialised (no torch here).

The weights region holds adapters. A layer begins with a head of int64: `num_in, total_rank, a, num_expands`, then for each expand `low, high, left,
right, b`; `a` and `b` are the byte offsets of row-major fp32 matrices in the same region, `total_rank` is 0 for a layer without A.

The jobs region begins with a mailbox per worker: one cache line of state that the worker writes, then one with the job that the parent writes. Behind
the mailboxes lie the activations and the results.

Ordering: a process that writes here rings an eventfd afterwards, and a process that reads has read the eventfd before; the kernel's lock on it orders
the two.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import torch

WORD_BYTES: Final = 8
FLOAT_BYTES: Final = 4
LINE_BYTES: Final = 64
MAILBOX_BYTES: Final = 2 * LINE_BYTES

HEAD_WORDS: Final = 4
EXPAND_WORDS: Final = 5


def head_bytes(num_expands: int) -> int:
    """Return the bytes of a layer's head."""
    return WORD_BYTES * (HEAD_WORDS + EXPAND_WORDS * num_expands)


def mailboxes_bytes(num_workers: int) -> int:
    """Return the bytes of all mailboxes; a multiple of a cache line."""
    return MAILBOX_BYTES * num_workers


class Job(NamedTuple):
    """The sum `results += scale · x · A · B` for `num_rows` rows.

    `layer` is the head's byte offset in the weights region; `x` and `results` are byte offsets in the jobs region of row-major fp32 matrices
    `[num_rows, num_in]` and `[num_rows, num_out]`.
    """

    layer: int
    x: int
    results: int
    num_rows: int
    num_in: int
    num_out: int
    scale: float


# Native numbers ("@"), each of which is written at once: the parent reads a worker's state while that writes it.
_JOB: Final = struct.Struct("@6qd")
_STATE: Final = struct.Struct("@2q")


@dataclass(frozen=True, slots=True)
class Mailbox:
    """One worker's mailbox: a state, which the worker writes, and a job, which the parent writes when the last job is done.

    Args:
        region: the jobs region, as bytes.
        start: the mailbox's first byte.
    """

    region: memoryview
    start: int

    @property
    def num_done(self) -> int:
        """The number of jobs that the worker has done."""
        return int(_STATE.unpack_from(self.region, self.start)[0])

    @property
    def is_ready(self) -> bool:
        """Whether the worker has loaded torch and waits for jobs."""
        return bool(_STATE.unpack_from(self.region, self.start)[1])

    def tell(self, num_done: int) -> None:
        """Tell the other process that the worker is ready. num_done: the jobs that it has done."""
        _STATE.pack_into(self.region, self.start, num_done, 1)

    def write(self, job: Job) -> None:
        """Put a job where `read` finds it."""
        _JOB.pack_into(self.region, self.start + LINE_BYTES, *job)

    def read(self) -> Job:
        """Return the job that `write` put here."""
        return Job._make(_JOB.unpack_from(self.region, self.start + LINE_BYTES))


def mailboxes(region: memoryview, num_workers: int) -> list[Mailbox]:
    """Return the mailboxes at the beginning of the jobs region (a byte view of it, writable)."""
    return [Mailbox(region, worker * MAILBOX_BYTES) for worker in range(num_workers)]


def matrix(region: torch.Tensor, offset: int, num_rows: int, num_columns: int) -> torch.Tensor:
    """View `[num_rows, num_columns]` fp32 at byte `offset` of a region given as flat fp32."""
    return region.as_strided((num_rows, num_columns), (num_columns, 1), offset // FLOAT_BYTES)


def memory_file(name: str, num_bytes: int) -> int:
    """Make anonymous shared memory of at least `num_bytes` bytes, in whole pages, and return its file descriptor.

    A memfd has no name in /dev/shm: the kernel frees it with its last descriptor and mapping, however its owners end. `multiprocessing.shared_memory`
    needs a tracker process for that, and leaves the segment behind when both are killed.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE)
    return fd

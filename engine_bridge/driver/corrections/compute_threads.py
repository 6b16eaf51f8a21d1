"""The number of threads that the engine thread computes on, kept as it was set.

Libraries that bring their own OpenMP, such as numba, set the calling thread's number to theirs. Measured: with vLLM's n-gram drafts a step of the
demo model took 66 to 265 ms in place of 3, since its small matrices were shared between all cores.
"""

from __future__ import annotations

import logging

import torch

log = logging.getLogger(__name__)


class ComputeThreads:
    """The number of compute threads of one thread, which makes this object and calls it.

    Args:
        num_threads: the number to keep; None: the number that the thread has now.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is not None:
            _set(num_threads)
        self._num_threads = torch.get_num_threads()
        self._was_changed = False

    def mend(self) -> None:
        """Set the number again where a library has changed it. Takes a tenth of a microsecond where it is unchanged."""
        found = torch.get_num_threads()
        if found == self._num_threads:
            return
        _set(self._num_threads)
        if not self._was_changed:
            self._was_changed = True
            log.warning(
                "a library has set the engine's number of threads to %d; it is %d again, from now on without a word",
                found,
                self._num_threads,
            )


def _set(num_threads: int) -> None:
    """Set the number past vLLM's CPU worker, which replaces `torch.set_num_threads` by a function that does nothing."""
    torch._C.set_num_threads(num_threads)

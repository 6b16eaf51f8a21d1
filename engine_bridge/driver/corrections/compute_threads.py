"""The number of threads that the engine thread computes on, kept as it was set.

Libraries with an OpenMP of their own, such as numba's, set the calling thread's number to theirs. Measured: with vLLM's n-gram drafts a step of the
demo model took 66 to 265 ms in place of 3, since its small matrices were shared between all cores.
"""

from __future__ import annotations

import logging

import torch

log = logging.getLogger(__name__)


class ComputeThreads:
    """Of one thread, which makes this and calls it. num_threads: None for as many as it has now."""

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is not None:
            _set(num_threads)
        self._num_threads = torch.get_num_threads()
        self._was_changed = False

    def mend(self) -> None:
        """Set the number again where something has changed it. Takes a tenth of a microsecond where nothing has."""
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
    """vLLM's CPU worker replaces `torch.set_num_threads` by a function that does nothing."""
    torch._C.set_num_threads(num_threads)

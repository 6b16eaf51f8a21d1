"""The number of threads that the engine thread computes on, kept as it was set.

Libraries that bring their own OpenMP, such as numba, set the calling thread's number to theirs. Measured: with vLLM's n-gram drafts a step of the
demo model took 66 to 265 ms in place of 3, since its small matrices were shared between all cores.

All engines of a process compute on as many threads as the first one, from before they are built. vLLM keeps oneDNN's matrix products for the
whole process and knows them by their sizes; one that was made for two threads gives wrong numbers on one, and the other way round (measured with vLLM
0.32: every answer of a second engine was wrong).
"""

from __future__ import annotations

import logging

import torch

log = logging.getLogger(__name__)
_of_process: int | None = None
"""The number of threads of the first engine of this process."""


class ComputeThreads:
    """The number of compute threads of one thread, which makes this object and calls it.

    Args:
        num_threads: the number to keep; None: the number that torch has for this thread.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        global _of_process
        wanted = num_threads if num_threads is not None else torch.get_num_threads()
        _of_process = _of_process or wanted
        if wanted != _of_process:
            log.warning(
                "an engine before this one computed on %d threads, so this one does, too", _of_process
            )
        _set(_of_process)
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

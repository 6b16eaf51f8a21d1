"""Loops that numba compiles for this machine. Importing this takes half a second and 120 MB; vLLM brings numba along."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
from llvmlite.binding import ffi

log = logging.getLogger(__name__)

# While vLLM builds an engine it asks every value of every module for its `__dict__`. This library object takes `__dict__` for the name of an LLVM
# function, and vLLM fails, unless the name is known here.
ffi.lib._fntab["__dict__"] = {}


def compiled(signature: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile a function of this signature (numba's notation) at once, to run without the GIL. The code is kept on disk where it can be."""

    def of(function: Callable[..., None]) -> Callable[..., None]:
        """Return the compiled function."""
        made: Any
        try:
            made = numba.njit(signature, nogil=True, cache=True)(function)
        except Exception as error:  # no writable folder, a full disk, a damaged file
            log.info("compiled code of %s is not kept: %s", function.__name__, error)
            made = numba.njit(signature, nogil=True)(function)
        result: Callable[..., None] = made
        return result

    return of

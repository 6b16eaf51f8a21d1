"""Loops that numba compiles for this machine. Importing this takes half a second and 120 MB; vLLM brings numba along."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
from llvmlite.binding import ffi

log = logging.getLogger(__name__)

# vLLM asks every value of every module for its `__dict__` when it builds an engine. This one takes that for a function of LLVM's, and vLLM fails.
ffi.lib._fntab["__dict__"] = {}


def compiled(signature: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile a function at once, without the GIL while it runs; kept on disk where there is a place for that."""

    def of(function: Callable[..., None]) -> Callable[..., None]:
        made: Any
        try:
            made = numba.njit(signature, nogil=True, cache=True)(function)
        except Exception as error:  # no folder that can be written, a full disk, a damaged file
            log.info("compiled code of %s is not kept: %s", function.__name__, error)
            made = numba.njit(signature, nogil=True)(function)
        result: Callable[..., None] = made
        return result

    return of

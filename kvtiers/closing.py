"""Closing goes on over errors: what must be given back is given back, whatever fails on the way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """One step of closing: an error in it is logged with its name, and the steps behind it are done all the same."""
    try:
        yield
    except Exception:
        log.exception("%s could not be closed in good order; the rest is closed all the same", what)

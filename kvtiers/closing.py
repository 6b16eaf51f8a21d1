"""Closing goes on over errors: what must be given back is given back, whatever fails on the way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

log = logging.getLogger(__name__)


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """One step of closing: an error in it is logged with its name, and the steps behind it are done all the same."""
    try:
        yield
    except Exception:
        log.exception("%s could not be closed in good order; the rest is closed all the same", what)


class Closable(Protocol):
    """What has something to give back."""

    def close(self) -> None: ...


def close_all(*parts: Closable | None) -> None:
    """Close them one after the other, each whatever becomes of the others. None: there is nothing in its place."""
    for part in parts:
        if part is not None:
            with going_on(type(part).__name__):
                part.close()

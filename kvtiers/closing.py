"""Closing parts one after the other, whatever error one of them raises."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

log = logging.getLogger(__name__)


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """Log an error of one step of closing under its name, so that the following steps are done all the same."""
    try:
        yield
    except Exception:
        log.exception("%s could not be closed in good order; the rest is closed all the same", what)


class Closable(Protocol):
    """A part that holds something to give back."""

    def close(self) -> None:
        """Give it back."""


def close_all(*parts: Closable | None) -> None:
    """Close the parts one after the other, each whatever error another raises; None is skipped."""
    for part in parts:
        if part is not None:
            with going_on(type(part).__name__):
                part.close()

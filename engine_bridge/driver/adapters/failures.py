"""Failures of single adapters: each is told to its adapter's requests, and all other requests continue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine_bridge.adapters.errors import AdapterRejected, quoted

log = logging.getLogger(__name__)


class Failures:
    """Adapters that could not be made ready to compute with, and whose requests have not been told yet.

    Args:
        on_spoiled: called with an adapter's id in a step that computes the adapter's rows without it: those rows' results must not be kept.
    """

    def __init__(self, name_of: Callable[[int], str], on_spoiled: Callable[[int], None]) -> None:
        self._name_of, self._on_spoiled = name_of, on_spoiled
        self._errors: dict[int, AdapterRejected] = {}
        self.is_in_step = False

    def __bool__(self) -> bool:
        return bool(self._errors)

    @contextmanager
    def contained(self, adapter_id: int) -> Iterator[None]:
        """Turn an error raised inside of `with` into this adapter's failure."""
        try:
            yield
        except Exception as error:
            self.note(adapter_id, error)

    def note(self, adapter_id: int, error: Exception) -> None:
        """Note that an adapter has failed; only the first of its failures is logged and told."""
        if adapter_id in self._errors:
            return
        name = self._name_of(adapter_id)
        log.error(
            "adapter %s could not be made ready to compute with; its requests end", name, exc_info=error
        )
        self._errors[adapter_id] = AdapterRejected(
            f"Adapter {quoted(name)} could not be made ready to compute with.", code="not_ready"
        )
        if self.is_in_step:
            self._on_spoiled(adapter_id)

    def take(self) -> dict[int, AdapterRejected]:
        """Return, once, the errors to tell, by adapter."""
        errors, self._errors = self._errors, {}
        return errors

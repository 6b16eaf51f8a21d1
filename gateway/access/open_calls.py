"""API calls under way, so that those of one key can be ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager

from gateway.access.auth import withdrawn


class OpenCalls:
    """API calls under way, by `Principal.key`."""

    def __init__(self) -> None:
        self._open: dict[str, set[asyncio.Timeout]] = {}

    @asynccontextmanager
    async def of(self, key: str) -> AsyncIterator[None]:
        """Register a call while the context is open. Raises GatewayError `unauthorized` when `cut_off` ends it."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._open.setdefault(key, set()).add(scope)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            calls = self._open[key]
            calls.discard(scope)
            if not calls:
                del self._open[key]
        # Also where the call took its cancellation for the client's leaving, and answered.
        if scope.expired():
            raise withdrawn()

    def is_open(self, keys: Container[str]) -> bool:
        """Return whether a call of one of these keys is under way."""
        return any(key in keys for key in self._open)

    def cut_off(self, key: str) -> None:
        """End all calls of this key."""
        now = asyncio.get_running_loop().time()
        for scope in self._open.get(key, ()):
            if not scope.expired():
                scope.reschedule(now)

"""API calls under way, so that those of one key can be ended, and those of one person waited for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.access.auth import Principal, withdrawn


class OpenCalls:
    """API calls under way, by `Principal.key`."""

    def __init__(self) -> None:
        self._open: dict[str, set[asyncio.Timeout]] = {}
        # Beside the keys: those of a person are no longer known once they are withdrawn.
        self._num_of_owner: Counter[str] = Counter()

    @asynccontextmanager
    async def of(self, principal: Principal) -> AsyncIterator[None]:
        """Register a call while the context is open. Raises GatewayError `unauthorized` when `cut_off` ends it."""
        scope, key, owner = asyncio.timeout(None), principal.key, principal.owner
        self._num_of_owner[owner] += 1
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
            self._num_of_owner[owner] -= 1
            if not self._num_of_owner[owner]:
                del self._num_of_owner[owner]
        # Also where the call took its cancellation for the client's leaving, and answered.
        if scope.expired():
            raise withdrawn()

    def is_open(self, owner: str) -> bool:
        """Return whether a call of this person is under way, whatever its key, and also while it ends."""
        return owner in self._num_of_owner

    def cut_off(self, key: str) -> None:
        """End all calls of this key."""
        now = asyncio.get_running_loop().time()
        for scope in self._open.get(key, ()):
            if not scope.expired():
                scope.reschedule(now)

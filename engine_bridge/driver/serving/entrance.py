"""The entrance of API calls: how many calls of a tenant are made ready for the engine at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Entrance:
    """Lets a few calls of each tenant be made ready for the engine at a time; the others wait.

    One thread tokenises, so more calls would not be ready sooner; but validating hundreds of calls in a row blocks the event loop for all other
    calls.
    """

    def __init__(self, num_at_once: int = 4) -> None:
        self._num_at_once = num_at_once
        self._tenants: dict[str, _Tenant] = {}

    async def enter(self, tenant: str) -> Callable[[], None]:
        """Wait for a place. Returns a function that gives the place back, which may be called twice."""
        own = self._tenants.setdefault(tenant, _Tenant(self._num_at_once))
        own.num_users += 1
        try:
            await own.places.acquire()
        except BaseException:
            self._leave(tenant, own)
            raise
        is_left = False

        def leave() -> None:
            """Give the place back, unless that was done before."""
            nonlocal is_left
            if not is_left:
                is_left = True
                own.places.release()
                self._leave(tenant, own)

        return leave

    def _leave(self, tenant: str, own: _Tenant) -> None:
        own.num_users -= 1
        if not own.num_users:
            del self._tenants[tenant]


class _Tenant:
    def __init__(self, num_at_once: int) -> None:
        self.places = asyncio.Semaphore(num_at_once)
        self.num_users = 0

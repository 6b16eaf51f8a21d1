"""Erasures under way: each goes on whether or not its caller waits, so that a large one is many short calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.errors import GatewayError
from gateway.people.estate import Erased

log = logging.getLogger(__name__)

# Chosen: below what browsers, proxies and commands wait for a reply, and long enough for nearly everybody's conversations.
WAIT_S = 5.0


class Erasures:
    """The erasures of a server that runs, one for each person at most."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Erased]] = {}

    async def wait_for(
        self, owner: str, erase: Callable[[], Coroutine[Any, Any, Erased]], *, is_known: bool
    ) -> Erased | None:
        """Begin to erase a person, or join the erasure that was begun, and wait for WAIT_S; None if it is not done then: ask again.

        is_known: whether the key file has the person now. An erasure that has ended was of an earlier time then, or has failed.

        Raises what `erase` raises.
        """
        task = self._tasks.get(owner)
        if task is None or (is_known and task.done()):
            task = self._tasks[owner] = asyncio.create_task(erase())
            task.add_done_callback(_note_failure)
        done, _ = await asyncio.wait((task,), timeout=WAIT_S)
        if not done:
            return None
        self._tasks.pop(owner, None)
        return task.result()

    async def drain(self) -> None:
        """Stop what is under way. The people stay in the key file, disabled, and what is condemned goes with the purges of the next start."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def _note_failure(task: asyncio.Task[Erased]) -> None:
    """Log what ended an erasure: its caller may have gone."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    known = error.message if isinstance(error, GatewayError) else ""
    log.error("a person could not be erased: %s", known or error, exc_info=None if known else error)

"""Changes of people while the server runs: of the key file, which takes effect at once, and the end of all that a person has."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from engine_bridge.protocol.errors import EngineUnavailable
from gateway.access.auth import tenant_of
from gateway.doors.http.key_changes import read_again
from gateway.errors import GatewayError, StartupError
from gateway.people.estate import Erased, erase_left_kv
from gateway.people.roll import (
    NoSuchPerson,
    Person,
    Roll,
    RollError,
    changing,
    keeping_an_operator,
    read_roll,
)
from gateway.services import Services
from gateway.sessions.connection import disk_full, is_full
from gateway.shelf.store import NAME as SHELF_NAME
from gateway.shelf.store import Shelf

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# How long an erasure waits for running calls and turns to end, and between two looks. Chosen: a turn that is stopped ends within a step or two.
ENDING_S, LOOK_EVERY_S = 30.0, 0.05


def key_file_of(services: Services) -> Path:
    """Return the key file. Raises GatewayError `conflict` where the server has none."""
    path = services.config.api_key_file
    if path is None:
        raise GatewayError(
            "conflict",
            "This server has no key file, so it has no people to change: start it with --api-key-file.",
        )
    return path


async def people_of(services: Services) -> Roll:
    """Return the people of the key file. Raises GatewayError `conflict`, `storage_failed`."""
    path, known = key_file_of(services), services.usage.key_owners()
    return await _in_thread(lambda: read_roll(path, known))


async def person_of(services: Services, named: str) -> Person:
    """Return the person of this name or owner id; see `Roll.find_or_gone`. Raises GatewayError `not_found`, `conflict`, `storage_failed`."""
    path, known = key_file_of(services), services.usage.key_owners()
    return await _in_thread(lambda: read_roll(path, known).find_or_gone(named))


async def change(services: Services, work: Callable[[Roll], _T]) -> _T:
    """Change the people of the key file by `work`, have the server follow at once, and return what `work` returned.

    On a full disk it takes of the room that is kept for that: whoever has filled the disk can still be shut out. Raises GatewayError `not_found`,
    `conflict`, `storage_failed`, `overloaded`; then nothing was changed.
    """
    path, known = key_file_of(services), services.usage.key_owners()

    def write() -> _T:
        """Do the work and write the file."""
        with changing(path, known) as roll, keeping_an_operator(roll):
            return work(roll)

    try:
        result = await _in_thread(write)
    except GatewayError as error:
        if error.code != "overloaded" or not await services.store.make_room():
            raise
        result = await _in_thread(write)
    await read_again(services)
    return result


async def _in_thread(work: Callable[[], _T]) -> _T:
    try:
        return await asyncio.to_thread(work)
    except NoSuchPerson as error:
        raise GatewayError("not_found", error.message) from error
    except RollError as error:
        raise GatewayError("conflict", error.message) from error
    except StartupError as error:  # its text names files, which are the operator's machine's
        log.error("people could not be read or changed: %s", error.message)
        if is_full(error.__cause__):
            raise disk_full() from error
        message = "The key file cannot be read or changed now. The server's log says why."
        raise GatewayError("storage_failed", message) from error


async def erase(services: Services, person: Person) -> Erased:
    """Erase all data of a person who is shut out: conversations, usage, learned habits, and KV on all nodes.

    Raises GatewayError `overloaded` if a call or turn of the person's does not end, or if an engine is not up, so that its KV is left; then try
    again.
    """
    owner = person.owner
    services.drafts.stop_owner(owner)
    await services.turns.stop_owner(owner)
    await _until_ended(services, owner)
    sessions = await services.store.rows.ids_of(owner)
    num_sessions = await services.store.erase_owner(owner, time.time())
    for session_id in sessions:
        services.advisories.end_session(owner, session_id)
        services.node.end_session(tenant_of(owner), session_id)
    await services.sign_ins.forget(owner)
    await services.usage.forget(owner)
    await services.learned.forget(owner)
    services.documents.forget(owner)
    await asyncio.to_thread(Shelf(services.config.data_dir / SHELF_NAME).erase, owner)
    try:
        num_blocks = await services.node.erase_kv(tenant_of(owner))
    except EngineUnavailable as error:
        message = "All is erased but KV, of an engine that is not up or a node that is away. Try it again when it is back."
        raise GatewayError("overloaded", message) from error
    return Erased(num_sessions, num_blocks + await _erase_left_kv(services, owner))


async def _erase_left_kv(services: Services, owner: str) -> int:
    """Erase a person's KV in stores of engines that this server had before, and return the number of blocks. Raises GatewayError."""
    kv_dir, nodes = services.config.kv_dir, [node.id for node in services.maintenance.states()]
    assert kv_dir is not None  # filled in by Config
    try:
        return await asyncio.to_thread(erase_left_kv, kv_dir, owner, nodes)
    except OSError as error:
        log.error("KV of an engine before could not be erased: %s", error)
        message = "All is erased but KV on disk, which cannot be overwritten now. The server's log says why."
        raise GatewayError("storage_failed", message) from error


async def _until_ended(services: Services, owner: str) -> None:
    """Wait for the calls and turns of a person, which were stopped: the end of an answer is stored, and would outlive the erasure."""
    for _ in range(int(ENDING_S / LOOK_EVERY_S)):
        busy = (
            services.turns.is_busy(owner),
            services.calls.is_open(owner),
            services.background.is_busy(owner),
        )
        if not any(busy):
            return
        await asyncio.sleep(LOOK_EVERY_S)
    raise GatewayError("overloaded", "Answers of this person are still under way. Try it again in a moment.")

"""Keys that change while the server runs: the key file is followed, and the end of a key or of a sign-in ends everything under way with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from gateway.access.auth import Withdrawn
from gateway.errors import StartupError
from gateway.file_signature import Signature, signature_of
from gateway.people.audit import Entry
from gateway.services import Services

log = logging.getLogger(__name__)

# How often the file and the sign-ins are checked. Chosen: that costs microseconds, and a leaked key works no longer than this.
LOOK_EVERY_S = 1.0
# Of one reading: changes that the audit log names. Chosen: a line of some kB.
MAX_NAMED = 50


async def follow_key_file(services: Services) -> None:
    """Run until cancelled: take over changes of the key file, and read it when `look_at_keys` is set.

    A file that is broken, empty or missing changes nothing, and is reported once.
    """
    path = services.config.api_key_file
    assert path is not None
    read: Signature | str = "not yet"
    last: Signature | str = read
    while True:
        try:
            found = await asyncio.to_thread(signature_of, path)
            # A file that still changes may be half written: it is read once two looks find the same.
            if (found != read and found == last) or services.look_at_keys.is_set():
                services.look_at_keys.clear()
                read = found  # noted before it is read: what changes meanwhile is read the next time
                await read_again(services)
            last = found
        except Exception:
            log.exception("looking after the key file failed; it is tried again")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY_S):
                await services.look_at_keys.wait()


async def follow_sign_ins(services: Services) -> None:
    """Run until cancelled: cut off browsers whose sign-in has ended by itself (see `cut_off`)."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        await asyncio.gather(*(cut_off(services, ended) for ended in services.sign_ins.take_ended()))


async def read_again(services: Services) -> None:
    """Accept the keys that the file holds now, and cut off withdrawn keys (see `cut_off`).

    If the file is broken the keys stay as they are, and the log says where.
    """
    async with services.reading_keys:  # or keys that were read earlier could be taken over later
        lost = await _take_over(services)
    await asyncio.gather(*(cut_off(services, key) for key in lost))


async def _take_over(services: Services) -> frozenset[Withdrawn]:
    keys = services.keys
    try:
        entries = await asyncio.to_thread(keys.read)
    except StartupError as error:
        log.error("%s The keys stay as they were.", error.message)
        return frozenset()
    changes = keys.changes(entries)
    lost = keys.take_over(entries)
    if changes:
        log.info("the key file was read again: %r, %d withdrawn that were in use", keys, len(lost))
        more = f"; {len(changes) - MAX_NAMED} more" if len(changes) > MAX_NAMED else ""
        about = "; ".join(changes[:MAX_NAMED]) + more
        services.audit.note(Entry(what="keys_read", place="key file", about=about))
    return lost


async def cut_off(services: Services, withdrawn: Withdrawn) -> None:
    """End everything under way with a key. Answers in conversations end with the last key of their person, because the others may be reading."""
    services.calls.cut_off(withdrawn.key)
    if withdrawn.is_last:
        services.drafts.stop_owner(withdrawn.owner)
        await services.turns.stop_owner(withdrawn.owner)
    sockets = [socket for socket in services.connections if socket.key == withdrawn.key]
    await asyncio.gather(*(socket.revoke() for socket in sockets))
